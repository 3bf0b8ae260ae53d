// y[row, OUT_AT + first_output + n] = Σ_k x[row, k] * weight8(n, k) + bias[first_output + n], for a few rows, on a CPU
//
// For software devices, whose lanes are a CPU's: each makes one output of two rows from first to last column, so that all
// lanes read the same x at the same time and nothing passes through workgroup memory, both of which these devices do
// badly otherwise. The order of addition is that of `gemv`: within a block of 32 columns, then block by block.
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override HAS_BIAS: u32; // 0: `bias` is not read
override ROUND: u32; // 1: the output is rounded to bfloat16

const SCALES = 5; // where an encoding that has scales binds them
const LANES = 32u;
const BLOCK8 = 4u; // columns of a block, in loads of eight

struct Params {
  rows: u32,
  outputs: u32, // rows of this weight
  first_output: u32, // the output that its first row makes
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let mine = group.x * LANES + lane;
  let output = min(mine, params.outputs - 1u);
  let row = group.y * 2u;
  let columns8 = WEIGHT_STRIDE / 8u;
  let x_at = row * columns8 * 2u;
  let next_at = min(row + 1u, params.rows - 1u) * columns8 * 2u; // an odd last row is made twice

  var total = 0.0;
  var next_total = 0.0;
  for (var first8 = 0u; first8 < columns8; first8 += BLOCK8) {
    let run = weight_run(output, first8 / BLOCK8);
    let end = min(first8 + BLOCK8, columns8);
    var sum = 0.0;
    var next_sum = 0.0;
    for (var k8 = first8; k8 < end; k8++) {
      let w = run8(run, output, k8);
      sum = add8(x[x_at + k8 * 2u], x[x_at + k8 * 2u + 1u], w, sum);
      next_sum = add8(x[next_at + k8 * 2u], x[next_at + k8 * 2u + 1u], w, next_sum);
    }
    total += sum;
    next_total += next_sum;
  }

  if (mine >= params.outputs) {
    return;
  }
  store(row, mine, total);
  if (row + 1u < params.rows) {
    store(row + 1u, mine, next_total);
  }
}

// Eight columns, one after another.
fn add8(x0: vec4<f32>, x1: vec4<f32>, w: mat2x4<f32>, before: f32) -> f32 {
  var sum = fma(x0.x, w[0].x, before);
  sum = fma(x0.y, w[0].y, sum);
  sum = fma(x0.z, w[0].z, sum);
  sum = fma(x0.w, w[0].w, sum);
  sum = fma(x1.x, w[1].x, sum);
  sum = fma(x1.y, w[1].y, sum);
  sum = fma(x1.z, w[1].z, sum);
  return fma(x1.w, w[1].w, sum);
}

fn store(row: u32, output: u32, sum: f32) {
  let column = params.first_output + output;
  var value = sum;
  if (HAS_BIAS == 1u) {
    value += bias[column];
  }
  y[row * STRIDE_OUT + OUT_AT + column] = select(value, round_bf16(value), ROUND == 1u);
}
