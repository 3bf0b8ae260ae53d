// Weights in INT8 (bitsandbytes, LLM.int8()): a weight is code * SCB of its row / 127, rounded to bfloat16.
// Four codes to a word, the first in the lowest bits: [rows, WEIGHT_STRIDE / 4].
override WEIGHT_STRIDE: u32; // columns of a stored row, a multiple of 8

@group(0) @binding(1) var<storage, read> weight: array<vec2<u32>>;
@group(0) @binding(SCALES) var<storage, read> scales: array<f32>; // SCB of each row: its largest magnitude

// 32 neighbours of one row, from column 32 * column32 on: one load of SCB.
struct Run {
  scale: f32,
}

fn weight_run(row: u32, column32: u32) -> Run {
  return Run(scales[row]);
}

// Eight of them, from column 8 * column8 on.
fn run8(run: Run, row: u32, column8: u32) -> mat2x4<f32> {
  let codes = weight[row * (WEIGHT_STRIDE / 8u) + column8];
  return mat2x4<f32>(decode4(codes.x, run.scale), decode4(codes.y, run.scale));
}

// Eight neighbours of one row, from column 8 * column8 on.
fn weight8(row: u32, column8: u32) -> mat2x4<f32> {
  return run8(weight_run(row, column8 / 4u), row, column8);
}

fn decode4(codes: u32, scale: f32) -> vec4<f32> {
  let word = bitcast<i32>(codes); // a shift to the right keeps the sign
  return vec4<f32>(
    decode((word << 24u) >> 24u, scale),
    decode((word << 16u) >> 24u, scale),
    decode((word << 8u) >> 24u, scale),
    decode(word >> 24u, scale),
  );
}

// Rounded as by `round_bf16`, without its case for NaN: SCB is a number.
fn decode(code: i32, scale: f32) -> f32 {
  let bits = bitcast<u32>(f32(code) * scale * 0.007874015718698502); // 1 / 127 in float32
  return bitcast<f32>((bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u);
}
