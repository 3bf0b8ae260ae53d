// outliers[k / 32] bit k % 32 = whether |bf16(x[row, k])| ≥ 6 in any row of the call (bitsandbytes, LLM.int8())
//
// x: [rows, STRIDE]; outliers: [STRIDE / 32, rounded up]. A workgroup makes one word: 32 columns side by side, in LINES
// lanes each, of which every one takes each LINES-th row.
override STRIDE: u32;

const COLUMNS = 32u;
const LINES = 4u;

struct Params {
  rows: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> outliers: array<u32>;

var<workgroup> found: atomic<u32>;

@compute @workgroup_size(COLUMNS, LINES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
  let column = group.x * COLUMNS + local.x;
  if (column < STRIDE) {
    for (var row = local.y; row < params.rows; row += LINES) {
      if (is_outlier(x[row * STRIDE + column])) {
        atomicOr(&found, 1u << local.x);
        break;
      }
    }
  }
  workgroupBarrier();
  if (local.x == 0u && local.y == 0u) {
    outliers[group.x] = atomicLoad(&found);
  }
}
