// What LLM.int8() takes out of the integers: a value of 6 or more, as the bfloat16 number that a module is given.

// NaN is none: it shows in the scale of its row.
fn is_outlier(value: f32) -> bool {
  let magnitude = bitcast<u32>(round_bf16(value)) & 0x7fffffffu;
  return magnitude >= 0x40c00000u && magnitude <= 0x7f800000u; // 6 to infinity
}
