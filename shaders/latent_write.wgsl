// cache[slot[t]] = bf16(x[t]): the compressed keys and values of new tokens
// x: [tokens, STRIDE]; cache: [slots, ceil(COLUMNS / 2)], two values to a word
override STRIDE: u32;
override COLUMNS: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> slots: array<u32>; // where each token goes
@group(0) @binding(3) var<storage, read_write> cache: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let words = (COLUMNS + 1u) / 2u;
  if (id.x >= words) {
    return;
  }
  let at = id.y * STRIDE + id.x * 2u;
  let has_second = id.x * 2u + 1u < COLUMNS;
  cache[slots[id.y] * words + id.x] = pack_bf16(x[at], select(0.0, x[at + 1u], has_second));
}
