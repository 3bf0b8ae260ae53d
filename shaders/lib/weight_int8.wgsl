// Weights in INT8 (bitsandbytes, LLM.int8()): a weight is code * SCB of its row / 127, rounded to bfloat16.
// Four codes to a word, the first in the lowest bits: [rows, WEIGHT_STRIDE / 4].
override WEIGHT_STRIDE: u32; // columns of a stored row, a multiple of 8

@group(0) @binding(1) var<storage, read> weight: array<vec2<u32>>;
@group(0) @binding(SCALES) var<storage, read> scales: array<f32>; // SCB of each row: its largest magnitude

// Eight neighbours of one row, from column 8 * column8 on.
fn weight8(row: u32, column8: u32) -> mat2x4<f32> {
  let codes = weight[row * (WEIGHT_STRIDE / 8u) + column8];
  let scale = scales[row];
  return mat2x4<f32>(decode4(codes.x, scale), decode4(codes.y, scale));
}

fn decode4(codes: u32, scale: f32) -> vec4<f32> {
  let word = bitcast<i32>(codes);
  return vec4<f32>(
    decode(extractBits(word, 0u, 8u), scale),
    decode(extractBits(word, 8u, 8u), scale),
    decode(extractBits(word, 16u, 8u), scale),
    decode(extractBits(word, 24u, 8u), scale),
  );
}

fn decode(code: i32, scale: f32) -> f32 {
  return round_bf16(f32(code) * scale * 0.007874015718698502); // 1 / 127 in float32
}
