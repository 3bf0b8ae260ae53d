// y[p, OUT_AT + first_output + n] = Σ_k x[p / SHARE, k] * weight8(expert of p, n, k), for a few pairs p      (decode)
//
// A pair is a token and one of its chosen experts: the weights of no other expert are read. The weight holds the experts
// from params.first_expert on, one behind the other, params.outputs rows of each. The rest, and the order of addition, is
// that of `gemv`: a workgroup makes OUTPUTS neighbouring outputs of one pair, in blocks of 32 columns.
override OUTPUTS: u32;
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override SHARE: u32; // pairs that have a row of x in common: all of a token, or 1
override BLOCKS: u32; // ceil(WEIGHT_STRIDE / 32)

const SCALES = 5; // where an encoding that has scales binds them
const LANES = 32u;
const BLOCK8 = 4u; // columns of a block, in loads of eight

struct Params {
  first_expert: u32,
  experts: u32, // in this weight
  outputs: u32, // rows of each
  first_output: u32, // the output that its first row makes
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> choice: array<u32>; // the expert of each pair
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

var<workgroup> block_sums: array<f32, OUTPUTS * BLOCKS>;

@compute @workgroup_size(LANES * OUTPUTS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let pair = group.y;
  let expert = choice[pair] - params.first_expert;
  if (expert >= params.experts) {
    return; // it is in another part
  }
  let slot = local / LANES;
  let output = group.x * OUTPUTS + slot;
  let weight_row = expert * params.outputs + output;
  let x_at = pair / SHARE * (WEIGHT_STRIDE / 8u);

  for (var block = local % LANES; block < BLOCKS; block += LANES) {
    var sum = 0.0;
    if (output < params.outputs) {
      let run = weight_run(weight_row, block);
      let end = min((block + 1u) * BLOCK8, WEIGHT_STRIDE / 8u);
      for (var k8 = block * BLOCK8; k8 < end; k8++) {
        let w = run8(run, weight_row, k8);
        let x0 = x[(x_at + k8) * 2u];
        let x1 = x[(x_at + k8) * 2u + 1u];
        sum = fma(x0.x, w[0].x, sum);
        sum = fma(x0.y, w[0].y, sum);
        sum = fma(x0.z, w[0].z, sum);
        sum = fma(x0.w, w[0].w, sum);
        sum = fma(x1.x, w[1].x, sum);
        sum = fma(x1.y, w[1].y, sum);
        sum = fma(x1.z, w[1].z, sum);
        sum = fma(x1.w, w[1].w, sum);
      }
    }
    block_sums[slot * BLOCKS + block] = sum;
  }
  workgroupBarrier();

  let mine = group.x * OUTPUTS + local;
  if (local < OUTPUTS && mine < params.outputs) {
    var total = 0.0;
    for (var block = 0u; block < BLOCKS; block++) {
      total += block_sums[local * BLOCKS + block];
    }
    y[pair * STRIDE_OUT + OUT_AT + params.first_output + mine] = total;
  }
}
