// y[t, :] = Σ_i weight[t, i] x[t, i, :]: the outputs of a token's experts, added in the order in which they were chosen
// x: [tokens, CHOSEN, STRIDE]; weight: [tokens, CHOSEN]; y: [tokens, STRIDE]
override CHOSEN: u32;
override STRIDE: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= STRIDE) {
    return;
  }
  var sum = 0.0;
  for (var i = 0u; i < CHOSEN; i++) {
    let pair = id.y * CHOSEN + i;
    sum = fma(weight[pair], x[pair * STRIDE + id.x], sum);
  }
  y[id.y * STRIDE + id.x] = sum;
}
