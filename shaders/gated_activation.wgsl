// y = activation(gate) · up, each value on its own: SwiGLU with silu, GeGLU with a gelu
// x: [rows, STRIDE], per row all gates, then all ups; y: [rows, STRIDE_OUT], COLUMNS of each
override COLUMNS: u32;
override STRIDE: u32;
override STRIDE_OUT: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= COLUMNS) {
    return;
  }
  let gate = id.y * STRIDE + id.x;
  y[id.y * STRIDE_OUT + id.x] = activate(x[gate]) * x[gate + COLUMNS];
}
