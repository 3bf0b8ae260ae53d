// y[row, OUT_AT + first_output + n] = Σ_k x[row, k] * weight8(n, k) + bias[first_output + n], for a few rows      (decode)
//
// A workgroup makes OUTPUTS neighbouring outputs of one row. The sum over k has one order, whatever the kernel: blocks
// of 32 columns, each added up from its first column to its last, then the blocks from first to last. `gemm` keeps the
// same order, so a row's numbers do not depend on how many rows there are.
// Each of the 32 lanes of an output takes every 32nd block: a run of 64 weight bytes, and its loads use up whole cache lines.
override OUTPUTS: u32;
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override HAS_BIAS: u32; // 0: `bias` is not read
override ROUND: u32; // 1: the output is rounded to bfloat16
override BLOCKS: u32; // ceil(WEIGHT_STRIDE / 32)

const SCALES = 5; // where an encoding that has scales binds them
const LANES = 32u;
const BLOCK8 = 4u; // columns of a block, in loads of eight

struct Params {
  outputs: u32, // rows of this weight
  first_output: u32, // the output that its first row makes
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

var<workgroup> block_sums: array<f32, OUTPUTS * BLOCKS>;

@compute @workgroup_size(LANES * OUTPUTS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let row = group.y;
  let slot = local / LANES;
  let output = group.x * OUTPUTS + slot;

  for (var block = local % LANES; block < BLOCKS; block += LANES) {
    var sum = 0.0;
    if (output < params.outputs) {
      let run = weight_run(output, block);
      let end = min((block + 1u) * BLOCK8, WEIGHT_STRIDE / 8u);
      for (var k8 = block * BLOCK8; k8 < end; k8++) {
        let w = run8(run, output, k8);
        let x0 = x[(row * (WEIGHT_STRIDE / 8u) + k8) * 2u];
        let x1 = x[(row * (WEIGHT_STRIDE / 8u) + k8) * 2u + 1u];
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
    let column = params.first_output + mine;
    if (HAS_BIAS == 1u) {
      total += bias[column];
    }
    y[row * STRIDE_OUT + OUT_AT + column] = select(total, round_bf16(total), ROUND == 1u);
  }
}
