// y[row, OUT_AT + first_output + n] = LLM.int8() of Σ_k codes[row, k] * weight[n, k], both in codes of 8 bits, for many rows
//
// The tiles of `gemm`: a workgroup of 8 × 8 lanes makes 32 rows × 32 outputs, each lane 4 × 4 of them, eight apart, and 32
// columns of both operands at a time pass through workgroup memory, four to a word.
const TILE = 32u;
const SIDE = 8u; // lanes along a side of the tile; a lane's rows (and outputs) are SIDE apart
const LINE = 9u; // words from one row to the next: 8, and one so that neighbouring lanes read from different banks

var<workgroup> x_tile: array<u32, TILE * LINE>;
var<workgroup> w_tile: array<u32, TILE * LINE>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let first_row = group.y * TILE;
  let first_output = group.x * TILE;
  let my_row = local / SIDE;
  let my_output = local % SIDE;

  find_outliers(local, SIDE * SIDE);
  var rows: array<vec4<i32>, 4>; // rows[r][n]
  for (var block8 = 0u; block8 < WEIGHT_STRIDE / 8u; block8 += 4u) {
    // 32 lines × 4 loads of eight columns, of both operands: two for each lane.
    for (var index = local; index < TILE * 4u; index += SIDE * SIDE) {
      load(first_row, first_output, block8, index);
    }
    workgroupBarrier();
    for (var k4 = 0u; k4 < TILE / 4u; k4++) {
      let w = vec4<u32>(
        w_tile[my_output * LINE + k4],
        w_tile[(my_output + SIDE) * LINE + k4],
        w_tile[(my_output + 2u * SIDE) * LINE + k4],
        w_tile[(my_output + 3u * SIDE) * LINE + k4],
      );
      rows[0] += dots(x_tile[my_row * LINE + k4], w);
      rows[1] += dots(x_tile[(my_row + SIDE) * LINE + k4], w);
      rows[2] += dots(x_tile[(my_row + 2u * SIDE) * LINE + k4], w);
      rows[3] += dots(x_tile[(my_row + 3u * SIDE) * LINE + k4], w);
    }
    workgroupBarrier();
  }

  for (var i = 0u; i < 16u; i++) {
    store(first_row + my_row + (i / 4u) * SIDE, first_output + my_output + (i % 4u) * SIDE, rows[i / 4u][i % 4u]);
  }
}

// Eight columns of one row of x and of one row of the weight; zeros beyond their ends.
fn load(first_row: u32, first_output: u32, block8: u32, index: u32) {
  let line = index / 4u;
  let k8 = block8 + index % 4u;
  let row = first_row + line;
  let output = first_output + line;
  let columns8 = WEIGHT_STRIDE / 8u;
  var x8 = vec2<u32>();
  var w8 = vec2<u32>();
  if (k8 < columns8 && row < params.rows) {
    x8 = codes[row * columns8 + k8];
  }
  if (k8 < columns8 && output < params.outputs) {
    w8 = weight[output * columns8 + k8];
  }
  let at = line * LINE + (index % 4u) * 2u;
  x_tile[at] = x8.x;
  x_tile[at + 1u] = x8.y;
  w_tile[at] = w8.x;
  w_tile[at + 1u] = w8.y;
}

// Four columns of one row with the same four columns of four outputs.
fn dots(x4: u32, w: vec4<u32>) -> vec4<i32> {
  return vec4<i32>(dot4(x4, w.x), dot4(x4, w.y), dot4(x4, w.z), dot4(x4, w.w));
}
