// y += x, rounded to bfloat16 at the end of a layer
// x, y: [rows, STRIDE]
override STRIDE: u32;
override ROUND: u32; // 1: the sum is rounded to bfloat16
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= STRIDE) {
    return;
  }
  let i = id.y * STRIDE + id.x;
  let sum = y[i] + x[i];
  y[i] = select(sum, round_bf16(sum), ROUND == 1u);
}
