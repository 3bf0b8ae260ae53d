// x = activation(x), each value on its own
// x: [rows, STRIDE]
override STRIDE: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= STRIDE) {
    return;
  }
  let i = id.y * STRIDE + id.x;
  x[i] = activate(x[i]);
}
