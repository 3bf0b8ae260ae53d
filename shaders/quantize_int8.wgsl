// codes = round_half_even(float16(weight) * scale of its row), with scale = 127 / SCB
//
// The host divides, for a WGSL division may be off by more than half a unit in the last place, and a product may lie on
// a tie. x: [rows, X_STRIDE] bfloat16, two to a word; scale: [rows]; codes: [rows, X_STRIDE / 4], as lib/weight_int8 reads
// them. One invocation makes eight codes.
override X_STRIDE: u32;
override WORKGROUP: u32;

struct Params {
  rows: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read_write> codes: array<vec2<u32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= X_STRIDE / 8u || id.y >= params.rows) {
    return;
  }
  let at = id.y * (X_STRIDE / 8u) + id.x;
  let words = x[at];
  codes[at] = vec2<u32>(pack4(words.x, words.y, scale[id.y]), pack4(words.z, words.w, scale[id.y]));
}

fn pack4(first: u32, second: u32, row_scale: f32) -> u32 {
  return code(unpack_low(first), row_scale)
    | (code(unpack_high(first), row_scale) << 8u)
    | (code(unpack_low(second), row_scale) << 16u)
    | (code(unpack_high(second), row_scale) << 24u);
}

fn code(value: f32, row_scale: f32) -> u32 {
  return bitcast<u32>(i32(round(half(value) * row_scale))) & 0xffu;
}

// A bfloat16 value as float16 holds it: below 2^-14 float16 has only multiples of 2^-24 left. Above 65504 it has
// nothing, which the host refuses.
fn half(value: f32) -> f32 {
  return select(value, round(value * 16777216.0) * 5.9604644775390625e-8, abs(value) < 6.103515625e-5);
}
