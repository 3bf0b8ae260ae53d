// absmax[b] = the largest magnitude of block b of the matrix laid out row after row, BLOCK values each
//
// x: [rows, X_STRIDE] bfloat16, two to a word, of which COLUMNS count. One invocation per block. Magnitudes are compared
// as integers: those of a bfloat16 order as its values do, infinity above all numbers, and NaN above infinity.
override COLUMNS: u32;
override X_STRIDE: u32;
override BLOCK: u32;
override WORKGROUP: u32;

struct Params {
  values: u32, // rows * COLUMNS
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read_write> absmax: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let block = id.y * groups.x * WORKGROUP + id.x;
  if (block >= (params.values + BLOCK - 1u) / BLOCK) {
    return;
  }
  let end = min((block + 1u) * BLOCK, params.values);
  var largest = 0u;
  for (var i = block * BLOCK; i < end; i++) {
    let element = (i / COLUMNS) * X_STRIDE + i % COLUMNS;
    largest = max(largest, (x[element / 2u] >> ((element % 2u) * 16u)) & 0x7fffu);
  }
  absmax[block] = bitcast<f32>(largest << 16u);
}
