// Weights in bfloat16: [rows, WEIGHT_STRIDE], eight to a vec4<u32>, row-major.
// WEIGHT_STRIDE counts elements and is a multiple of 8; the columns behind the last are zero.
override WEIGHT_STRIDE: u32;

@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;

// Eight neighbours of one row, from column 8 * column8 on.
fn weight8(row: u32, column8: u32) -> mat2x4<f32> {
  let words = weight[row * (WEIGHT_STRIDE / 8u) + column8];
  return mat2x4<f32>(
    unpack_low(words.x), unpack_high(words.x), unpack_low(words.y), unpack_high(words.y),
    unpack_low(words.z), unpack_high(words.z), unpack_low(words.w), unpack_high(words.w),
  );
}
