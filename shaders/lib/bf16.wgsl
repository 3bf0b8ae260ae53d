// bfloat16 as integers on bit patterns: WGSL has no such type, and float arithmetic may not be trusted to round.

// The nearest bfloat16 value, ties to even; NaN stays NaN.
fn round_bf16(value: f32) -> f32 {
  let bits = bitcast<u32>(value);
  let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u;
  let is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bitcast<f32>(select(rounded, (bits | 0x400000u) & 0xffff0000u, is_nan));
}

// Two values in one word, the first in the low half, as they lie in memory.
fn pack_bf16(first: f32, second: f32) -> u32 {
  return (bitcast<u32>(round_bf16(first)) >> 16u) | bitcast<u32>(round_bf16(second));
}

fn unpack_low(word: u32) -> f32 {
  return bitcast<f32>(word << 16u);
}

fn unpack_high(word: u32) -> f32 {
  return bitcast<f32>(word & 0xffff0000u);
}
