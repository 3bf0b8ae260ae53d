// token[row] = the column of the largest value in x[row, :], the lowest one among equals; NOT_A_TOKEN where a value is NaN
// One workgroup per row. x: [rows, STRIDE], of which COLUMNS count
override COLUMNS: u32;
override STRIDE: u32;
override WORKGROUP: u32; // a power of two: the tree halves it

const NOT_A_TOKEN = 0xffffffffu;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> token: array<u32>;

var<workgroup> best_key: array<u32, WORKGROUP>;
var<workgroup> best_column: array<u32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = group.x;
  var key = 0u;
  var column = NOT_A_TOKEN;
  for (var i = lane; i < COLUMNS; i += WORKGROUP) {
    let here = sortable(x[row * STRIDE + i]);
    if (column == NOT_A_TOKEN || here > key) {
      key = here;
      column = i;
    }
  }
  best_key[lane] = key;
  best_column[lane] = column;
  workgroupBarrier();

  for (var half = WORKGROUP / 2u; half > 0u; half /= 2u) {
    if (lane < half) {
      let other = lane + half;
      let wins = best_key[other] > best_key[lane]
        || (best_key[other] == best_key[lane] && best_column[other] < best_column[lane]);
      if (wins) {
        best_key[lane] = best_key[other];
        best_column[lane] = best_column[other];
      }
    }
    workgroupBarrier();
  }
  if (lane == 0u) {
    token[row] = select(best_column[0], NOT_A_TOKEN, best_key[0] == NOT_A_TOKEN);
  }
}

// A number that orders as the float does, -0 as +0; NaN comes first of all. Compared as integers, for a compiler may
// assume that there is no NaN.
fn sortable(value: f32) -> u32 {
  let bits = bitcast<u32>(value);
  let magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return NOT_A_TOKEN;
  }
  return select(0x80000000u + magnitude, 0x80000000u - magnitude, bits >> 31u == 1u);
}
