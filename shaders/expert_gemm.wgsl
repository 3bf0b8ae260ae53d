// y[p, OUT_AT + first_output + n] = Σ_k x[p / SHARE, k] * weight8(expert of p, n, k), for many pairs p      (prefill)
//
// `group_pairs` has put the pairs of an expert together in tiles: a workgroup gathers the rows of x of one tile, multiplies
// them by 32 rows of its expert, and scatters the results to the rows of their pairs. The weight holds the experts from
// params.first_expert on, one behind the other, params.outputs rows of each. The rest, and the order of addition, is that
// of `gemm`: 8 × 8 lanes, each 4 × 4 results, in blocks of 32 columns.
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override SHARE: u32; // pairs that have a row of x in common: all of a token, or 1

const SCALES = 6; // where an encoding that has scales binds them
const TILE = 32u;
const SIDE = 8u; // lanes along a side of the tile; a lane's rows (and outputs) are SIDE apart
const LINE = 9u; // vec4s from one row to the next: 8, and one so that neighbouring lanes read from different banks

struct Params {
  first_expert: u32,
  experts: u32, // in this weight
  outputs: u32, // rows of each
  first_output: u32, // the output that its first row makes
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> order: array<u32>;
@group(0) @binding(4) var<storage, read> tiles: array<vec4<u32>>; // expert, first in order, count
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

var<workgroup> x_tile: array<vec4<f32>, TILE * LINE>;
var<workgroup> w_tile: array<vec4<f32>, TILE * LINE>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let tile = tiles[group.y];
  let expert = tile.x - params.first_expert;
  if (tile.z == 0u || expert >= params.experts) {
    return; // there is none, or its expert is in another part
  }
  let first_output = group.x * TILE;
  let my_row = local / SIDE;
  let my_output = local % SIDE;

  var total = mat4x4<f32>(); // total[r][n]
  for (var block8 = 0u; block8 < WEIGHT_STRIDE / 8u; block8 += 4u) {
    // 32 lines × 4 loads of eight columns, of both operands: two for each lane.
    for (var index = local; index < TILE * 4u; index += SIDE * SIDE) {
      load(tile, expert * params.outputs, first_output, block8, index);
    }
    workgroupBarrier();

    var block = mat4x4<f32>();
    for (var k4 = 0u; k4 < TILE / 4u; k4++) {
      let w = transpose(mat4x4<f32>(
        w_tile[my_output * LINE + k4],
        w_tile[(my_output + SIDE) * LINE + k4],
        w_tile[(my_output + 2u * SIDE) * LINE + k4],
        w_tile[(my_output + 3u * SIDE) * LINE + k4],
      ));
      block[0] = multiply_add(x_tile[my_row * LINE + k4], w, block[0]);
      block[1] = multiply_add(x_tile[(my_row + SIDE) * LINE + k4], w, block[1]);
      block[2] = multiply_add(x_tile[(my_row + 2u * SIDE) * LINE + k4], w, block[2]);
      block[3] = multiply_add(x_tile[(my_row + 3u * SIDE) * LINE + k4], w, block[3]);
    }
    total += block;
    workgroupBarrier();
  }

  var sums = total; // a copy: what is indexed by a variable may have to lie in memory
  for (var i = 0u; i < 16u; i++) {
    store(tile, my_row + (i / 4u) * SIDE, first_output + my_output + (i % 4u) * SIDE, sums[i / 4u][i % 4u]);
  }
}

// Eight columns of one row of x and of one row of the weight; zeros beyond their ends.
fn load(tile: vec4<u32>, first_weight_row: u32, first_output: u32, block8: u32, index: u32) {
  let line = index / 4u;
  let k8 = block8 + index % 4u;
  let output = first_output + line;
  let columns8 = WEIGHT_STRIDE / 8u;
  var x8 = mat2x4<f32>();
  var w8 = mat2x4<f32>();
  if (k8 < columns8 && line < tile.z) {
    let row = order[tile.y + line] / SHARE;
    x8 = mat2x4<f32>(x[(row * columns8 + k8) * 2u], x[(row * columns8 + k8) * 2u + 1u]);
  }
  if (k8 < columns8 && output < params.outputs) {
    w8 = weight8(first_weight_row + output, k8);
  }
  let at = line * LINE + (index % 4u) * 2u;
  x_tile[at] = x8[0];
  x_tile[at + 1u] = x8[1];
  w_tile[at] = w8[0];
  w_tile[at + 1u] = w8[1];
}

// Four columns, one after another, into four outputs of one row. w[k] holds column k of the four outputs.
fn multiply_add(x4: vec4<f32>, w: mat4x4<f32>, sums: vec4<f32>) -> vec4<f32> {
  var next = fma(vec4<f32>(x4.x), w[0], sums);
  next = fma(vec4<f32>(x4.y), w[1], next);
  next = fma(vec4<f32>(x4.z), w[2], next);
  return fma(vec4<f32>(x4.w), w[3], next);
}

fn store(tile: vec4<u32>, line: u32, output: u32, sum: f32) {
  if (line >= tile.z || output >= params.outputs) {
    return;
  }
  y[order[tile.y + line] * STRIDE_OUT + OUT_AT + params.first_output + output] = sum;
}
