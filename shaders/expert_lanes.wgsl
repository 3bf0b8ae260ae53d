// y[p, OUT_AT + first_output + n] = Σ_k x[p / SHARE, k] * weight8(expert of p, n, k), pair by pair, on a CPU
//
// `expert_gemv` for software devices, as `gemv_lanes` is `gemv` for them: each lane makes one output from first to last
// column, and the lanes share their loads of x. The order of addition is the same.
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override SHARE: u32; // pairs that have a row of x in common: all of a token, or 1

const SCALES = 5; // where an encoding that has scales binds them
const LANES = 32u;

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

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
  let pair = group.y;
  let expert = choice[pair] - params.first_expert;
  if (expert >= params.experts) {
    return; // it is in another part
  }
  let mine = group.x * LANES + lane.index;
  let weight_row = expert * params.outputs + min(mine, params.outputs - 1u);

  let x_at = pair / SHARE * (WEIGHT_STRIDE / 4u);
  var total = 0.0;
  for (var k8 = 0u; k8 < WEIGHT_STRIDE / 8u; k8 += 4u) {
    total += block_sum(load_block(x_at, k8, lane), weight_row, k8);
  }

  if (mine < params.outputs) {
    y[pair * STRIDE_OUT + OUT_AT + params.first_output + mine] = total;
  }
}
