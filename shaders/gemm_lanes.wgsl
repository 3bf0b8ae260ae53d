// y[row, OUT_AT + first_output + n] = Σ_k x[row, k] * weight8(n, k) + bias[first_output + n], four rows at a time, on a CPU
//
// `gemv_lanes` for more rows: what a lane has loaded and decoded of a weight serves four of them, and what it has of x two
// outputs, LANES apart. The order of addition is the same for each.
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override HAS_BIAS: u32; // 0: `bias` is not read
override ROUND: u32; // 1: the output is rounded to bfloat16

const SCALES = 5; // where an encoding that has scales binds them
const LANES = 32u;
const ROWS = 4u;
const OUTPUTS = 2u; // of a lane

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
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
  let row = group.y * ROWS;
  let rows = min(row + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.rows - 1u)); // the last again where there are no four
  let x_at = rows * (WEIGHT_STRIDE / 4u);
  let mine = group.x * OUTPUTS * LANES + lane.index + vec2<u32>(0u, LANES);
  let output = min(mine, vec2<u32>(params.outputs - 1u));

  var total = mat2x4<f32>(); // of each output, of each row
  for (var k8 = 0u; k8 < WEIGHT_STRIDE / 8u; k8 += 4u) {
    let run = weight_run(output.x, k8 / 4u);
    let next_run = weight_run(output.y, k8 / 4u);
    let a = load_block(x_at.x, k8, lane);
    let b = load_block(x_at.y, k8, lane);
    let c = load_block(x_at.z, k8, lane);
    let d = load_block(x_at.w, k8, lane);
    let first = columns_of(first8(a), first8(b), first8(c), first8(d));
    var sum = add8(first, run8(run, output.x, k8), vec4<f32>());
    var next_sum = add8(first, run8(next_run, output.y, k8), vec4<f32>());
    if (has(k8 + 1u)) {
      let second = columns_of(second8(a), second8(b), second8(c), second8(d));
      sum = add8(second, run8(run, output.x, k8 + 1u), sum);
      next_sum = add8(second, run8(next_run, output.y, k8 + 1u), next_sum);
    }
    if (has(k8 + 2u)) {
      let third = columns_of(third8(a), third8(b), third8(c), third8(d));
      sum = add8(third, run8(run, output.x, k8 + 2u), sum);
      next_sum = add8(third, run8(next_run, output.y, k8 + 2u), next_sum);
    }
    if (has(k8 + 3u)) {
      let fourth = columns_of(fourth8(a), fourth8(b), fourth8(c), fourth8(d));
      sum = add8(fourth, run8(run, output.x, k8 + 3u), sum);
      next_sum = add8(fourth, run8(next_run, output.y, k8 + 3u), next_sum);
    }
    total += mat2x4<f32>(sum, next_sum);
  }

  for (var i = 0u; i < ROWS; i++) {
    store(row + i, mine.x, total[0][i]);
    store(row + i, mine.y, total[1][i]);
  }
}

// Whether a row has the columns from 8 * k8 on. Known when the pipeline is built, unless the last block is a part of one.
fn has(k8: u32) -> bool {
  return WEIGHT_STRIDE % 32u == 0u || k8 < WEIGHT_STRIDE / 8u;
}

// Eight columns of four rows: each column's four values together.
struct Columns8 {
  first4: mat4x4<f32>,
  last4: mat4x4<f32>,
}

fn columns_of(a: mat2x4<f32>, b: mat2x4<f32>, c: mat2x4<f32>, d: mat2x4<f32>) -> Columns8 {
  return Columns8(
    transpose(mat4x4<f32>(a[0], b[0], c[0], d[0])),
    transpose(mat4x4<f32>(a[1], b[1], c[1], d[1])),
  );
}

// One column after another.
fn add8(x: Columns8, w: mat2x4<f32>, before: vec4<f32>) -> vec4<f32> {
  return add4(x.last4, w[1], add4(x.first4, w[0], before));
}

fn add4(x: mat4x4<f32>, w: vec4<f32>, before: vec4<f32>) -> vec4<f32> {
  var sums = fma(x[0], vec4<f32>(w.x), before);
  sums = fma(x[1], vec4<f32>(w.y), sums);
  sums = fma(x[2], vec4<f32>(w.z), sums);
  return fma(x[3], vec4<f32>(w.w), sums);
}

fn store(row: u32, output: u32, sum: f32) {
  if (row >= params.rows || output >= params.outputs) {
    return;
  }
  let column = params.first_output + output;
  var value = sum;
  if (HAS_BIAS == 1u) {
    value += bias[column];
  }
  y[row * STRIDE_OUT + OUT_AT + column] = select(value, round_bf16(value), ROUND == 1u);
}
