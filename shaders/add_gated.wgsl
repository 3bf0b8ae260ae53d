// y[t, :] = y[t, :] + sigmoid(gate[t]) x[t, :]: an expert that every token has, as far as the token opens its gate
// x, y: [tokens, STRIDE]; gate: [tokens, GATE_STRIDE], of which the first column counts
override STRIDE: u32;
override GATE_STRIDE: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> gate: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < STRIDE) {
    let at = id.y * STRIDE + id.x;
    y[at] = fma(sigmoid(gate[id.y * GATE_STRIDE]), x[at], y[at]);
  }
}
