requires packed_4x8_integer_dot_product;

// Four products of signed bytes, added up: an instruction of its own on many devices.
fn dot4(a: u32, b: u32) -> i32 {
  return dot4I8Packed(a, b);
}
