// y[row, :] = the weights of a row as a kernel multiplies by them
// y: [rows, WEIGHT_STRIDE]. One invocation makes eight columns
override WORKGROUP: u32;

const SCALES = 3; // where an encoding that has scales binds them

struct Params {
  rows: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= WEIGHT_STRIDE / 8u || id.y >= params.rows) {
    return;
  }
  let at = (id.y * (WEIGHT_STRIDE / 8u) + id.x) * 2u;
  let values = weight8(id.y, id.x);
  y[at] = values[0];
  y[at + 1u] = values[1];
}
