// y[row, OUT_AT + first_output + n] = Σ_k x[row, k] * weight8(n, k) + bias[first_output + n], row by row, on a CPU
//
// For software devices, whose lanes are a CPU's: each makes one output from first to last column, so that all lanes need
// the same x at the same time and nothing passes through workgroup memory. A load costs these devices as much as ten
// multiplications, in each lane anew, so the lanes share the loads of x. The order of addition is that of `gemv`: within a
// block of 32 columns, then block by block.
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override HAS_BIAS: u32; // 0: `bias` is not read
override ROUND: u32; // 1: the output is rounded to bfloat16

const SCALES = 5; // where an encoding that has scales binds them
const LANES = 32u;

struct Params {
  outputs: u32, // rows of this weight
  first_output: u32, // the output that its first row makes
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
  let row = group.y;
  let mine = group.x * LANES + lane.index;
  let output = min(mine, params.outputs - 1u);

  let x_at = row * (WEIGHT_STRIDE / 4u);
  var total = 0.0;
  for (var k8 = 0u; k8 < WEIGHT_STRIDE / 8u; k8 += 4u) {
    total += block_sum(load_block(x_at, k8, lane), output, k8);
  }
  if (mine >= params.outputs) {
    return;
  }
  let column = params.first_output + mine;
  if (HAS_BIAS == 1u) {
    total += bias[column];
  }
  y[row * STRIDE_OUT + OUT_AT + column] = select(total, round_bf16(total), ROUND == 1u);
}
