// x = bf16(CAP · tanh(x / CAP)), each value on its own: what some models do to their logits
// x: [rows, STRIDE]
override STRIDE: u32;
override CAP: f32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= STRIDE) {
    return;
  }
  let i = id.y * STRIDE + id.x;
  if ((bitcast<u32>(x[i]) & 0x7fffffffu) <= 0x7f800000u) { // a NaN stays, to be found
    x[i] = round_bf16(soft_cap(x[i], CAP));
  }
}
