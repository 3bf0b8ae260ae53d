// y[row, :] = x[index[row], :]
// x, y: [rows, STRIDE]
override STRIDE: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> index: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < STRIDE) {
    y[id.y * STRIDE + id.x] = x[index[id.y] * STRIDE + id.x];
  }
}
