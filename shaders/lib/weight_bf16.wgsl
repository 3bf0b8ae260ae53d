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

// 32 neighbours of one row, from column 32 * column32 on, which share nothing here.
struct Run {
  nothing: u32,
}

fn weight_run(row: u32, column32: u32) -> Run {
  return Run();
}

// Eight of them, from column 8 * column8 on.
fn run8(run: Run, row: u32, column8: u32) -> mat2x4<f32> {
  return weight8(row, column8);
}
