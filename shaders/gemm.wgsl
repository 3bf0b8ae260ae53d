// y[row, first_output + n] = Σ_k x[row, k] * weight8(n, k) + bias[first_output + n], for many rows      (prefill)
//
// A workgroup of 8 × 8 lanes makes a tile of 32 rows × 32 outputs, each lane 4 × 4 of them in registers. 32 columns of
// both operands at a time pass through workgroup memory, stored column by column so that a lane reads its four as one.
// The order of addition is that of `gemv`: within a block of 32 columns from first to last, then block by block.
override STRIDE_OUT: u32;
override HAS_BIAS: u32; // 0: `bias` is not read
override ROUND: u32; // 1: the output is rounded to bfloat16

const TILE = 32u;
const QUAD = 8u; // lanes along a side of the tile, each of four rows or outputs

struct Params {
  rows: u32,
  outputs: u32, // rows of this weight
  first_output: u32, // column of y that its first row makes
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

var<workgroup> x_tile: array<array<f32, TILE>, TILE>; // [column][row]
var<workgroup> w_tile: array<array<f32, TILE>, TILE>; // [column][output]

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let first_row = group.y * TILE;
  let first_output = group.x * TILE;
  let my_rows = (local / QUAD) * 4u;
  let my_outputs = (local % QUAD) * 4u;
  let columns8 = WEIGHT_STRIDE / 8u;

  var total = mat4x4<f32>(); // total[r][n]
  for (var block8 = 0u; block8 < columns8; block8 += 4u) {
    // 32 rows × 4 loads of eight columns: two for each lane, of both operands.
    for (var load = local; load < TILE * 4u; load += 64u) {
      let line = load / 4u;
      let k8 = block8 + load % 4u;
      let row = first_row + line;
      let output = first_output + line;
      var x8 = mat2x4<f32>();
      var w8 = mat2x4<f32>();
      if (k8 < columns8) {
        if (row < params.rows) {
          x8 = mat2x4<f32>(x[(row * columns8 + k8) * 2u], x[(row * columns8 + k8) * 2u + 1u]);
        }
        if (output < params.outputs) {
          w8 = weight8(output, k8);
        }
      }
      // Written out: indexing a matrix by a variable would put it in memory.
      let k = (load % 4u) * 8u;
      x_tile[k][line] = x8[0].x;
      x_tile[k + 1u][line] = x8[0].y;
      x_tile[k + 2u][line] = x8[0].z;
      x_tile[k + 3u][line] = x8[0].w;
      x_tile[k + 4u][line] = x8[1].x;
      x_tile[k + 5u][line] = x8[1].y;
      x_tile[k + 6u][line] = x8[1].z;
      x_tile[k + 7u][line] = x8[1].w;
      w_tile[k][line] = w8[0].x;
      w_tile[k + 1u][line] = w8[0].y;
      w_tile[k + 2u][line] = w8[0].z;
      w_tile[k + 3u][line] = w8[0].w;
      w_tile[k + 4u][line] = w8[1].x;
      w_tile[k + 5u][line] = w8[1].y;
      w_tile[k + 6u][line] = w8[1].z;
      w_tile[k + 7u][line] = w8[1].w;
    }
    workgroupBarrier();

    var block = mat4x4<f32>();
    for (var k = 0u; k < TILE; k++) {
      let w = vec4<f32>(
        w_tile[k][my_outputs], w_tile[k][my_outputs + 1u], w_tile[k][my_outputs + 2u], w_tile[k][my_outputs + 3u],
      );
      block[0] = fma(vec4<f32>(x_tile[k][my_rows]), w, block[0]);
      block[1] = fma(vec4<f32>(x_tile[k][my_rows + 1u]), w, block[1]);
      block[2] = fma(vec4<f32>(x_tile[k][my_rows + 2u]), w, block[2]);
      block[3] = fma(vec4<f32>(x_tile[k][my_rows + 3u]), w, block[3]);
    }
    total += block;
    workgroupBarrier();
  }

  let row = first_row + my_rows;
  let output = first_output + my_outputs;
  store4(row, output, total[0]);
  store4(row + 1u, output, total[1]);
  store4(row + 2u, output, total[2]);
  store4(row + 3u, output, total[3]);
}

// Four neighbouring outputs of one row.
fn store4(row: u32, output: u32, sums: vec4<f32>) {
  store(row, output, sums.x);
  store(row, output + 1u, sums.y);
  store(row, output + 2u, sums.z);
  store(row, output + 3u, sums.w);
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
  y[row * STRIDE_OUT + column] = select(value, round_bf16(value), ROUND == 1u);
}
