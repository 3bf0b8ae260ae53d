// y[row, OUT_AT + first_output + n] = Σ_k x[row, k] * weight8(n, k) + bias[first_output + n], four rows at a time, on a CPU
//
// `gemv_lanes` for more rows: what a lane has loaded and decoded of a weight serves four of them. The order of addition is
// the same for each.
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override HAS_BIAS: u32; // 0: `bias` is not read
override ROUND: u32; // 1: the output is rounded to bfloat16

const SCALES = 5; // where an encoding that has scales binds them
const LANES = 32u;
const ROWS = 4u;

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
  let last = params.rows - 1u; // made again where there are no four
  let mine = group.x * LANES + lane.index;
  let output = min(mine, params.outputs - 1u);

  var total = vec4<f32>(); // of each row
  for (var k8 = 0u; k8 < WEIGHT_STRIDE / 8u; k8 += 4u) {
    let run = weight_run(output, k8 / 4u);
    let a = load_block(row, k8, lane);
    let b = load_block(min(row + 1u, last), k8, lane);
    let c = load_block(min(row + 2u, last), k8, lane);
    let d = load_block(min(row + 3u, last), k8, lane);
    var sum = add8(first8(a), first8(b), first8(c), first8(d), run8(run, output, k8), vec4<f32>());
    if (has(k8 + 1u)) {
      sum = add8(second8(a), second8(b), second8(c), second8(d), run8(run, output, k8 + 1u), sum);
    }
    if (has(k8 + 2u)) {
      sum = add8(third8(a), third8(b), third8(c), third8(d), run8(run, output, k8 + 2u), sum);
    }
    if (has(k8 + 3u)) {
      sum = add8(fourth8(a), fourth8(b), fourth8(c), fourth8(d), run8(run, output, k8 + 3u), sum);
    }
    total += sum;
  }

  if (mine >= params.outputs) {
    return;
  }
  store(row, mine, total.x);
  store(row + 1u, mine, total.y);
  store(row + 2u, mine, total.z);
  store(row + 3u, mine, total.w);
}

// Whether a row has the columns from 8 * k8 on. Known when the pipeline is built, unless the last block is a part of one.
fn has(k8: u32) -> bool {
  return WEIGHT_STRIDE % 32u == 0u || k8 < WEIGHT_STRIDE / 8u;
}

// Eight columns of four rows, one column after another.
fn add8(a: mat2x4<f32>, b: mat2x4<f32>, c: mat2x4<f32>, d: mat2x4<f32>, w: mat2x4<f32>, before: vec4<f32>) -> vec4<f32> {
  let sums = add4(mat4x4<f32>(a[0], b[0], c[0], d[0]), w[0], before);
  return add4(mat4x4<f32>(a[1], b[1], c[1], d[1]), w[1], sums);
}

fn add4(rows: mat4x4<f32>, w: vec4<f32>, before: vec4<f32>) -> vec4<f32> {
  let columns = transpose(rows);
  var sums = fma(columns[0], vec4<f32>(w.x), before);
  sums = fma(columns[1], vec4<f32>(w.y), sums);
  sums = fma(columns[2], vec4<f32>(w.z), sums);
  return fma(columns[3], vec4<f32>(w.w), sums);
}

fn store(row: u32, output: u32, sum: f32) {
  if (row >= params.rows) {
    return;
  }
  let column = params.first_output + output;
  var value = sum;
  if (HAS_BIAS == 1u) {
    value += bias[column];
  }
  y[row * STRIDE_OUT + OUT_AT + column] = select(value, round_bf16(value), ROUND == 1u);
}
