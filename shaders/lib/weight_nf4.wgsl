// Weights in NF4 (bitsandbytes, functional.py): a weight is NF4[code] * absmax of its block, rounded to bfloat16.
// Eight codes to a word, the first in the lowest bits: [rows, WEIGHT_STRIDE / 8]. A block is 64 neighbours of the matrix
// laid out row after row, so it may begin in one row and end in another.
override WEIGHT_STRIDE: u32; // columns of a stored row, a multiple of 8
override COLUMNS: u32; // columns of the matrix

@group(0) @binding(1) var<storage, read> weight: array<u32>;
@group(0) @binding(SCALES) var<storage, read> scales: array<f32>; // absmax of each block

const NF4 = array<f32, 16>(
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
  -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
  0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
);

// Eight neighbours of one row, from column 8 * column8 on.
fn weight8(row: u32, column8: u32) -> mat2x4<f32> {
  let codes = weight[row * (WEIGHT_STRIDE / 8u) + column8];
  let first = row * COLUMNS + column8 * 8u;
  let scale = scales[first / 64u];
  var scale8 = mat2x4<f32>(vec4<f32>(scale), vec4<f32>(scale));
  if (COLUMNS % 8u != 0u) {
    // A block may end among the eight.
    let next = scales[min(first / 64u + 1u, arrayLength(&scales) - 1u)];
    let left = vec4<u32>(64u - first % 64u);
    scale8[0] = select(vec4<f32>(scale), vec4<f32>(next), vec4<u32>(0u, 1u, 2u, 3u) >= left);
    scale8[1] = select(vec4<f32>(scale), vec4<f32>(next), vec4<u32>(4u, 5u, 6u, 7u) >= left);
  }
  return mat2x4<f32>(
    decode(codes, 0u, scale8[0].x), decode(codes, 4u, scale8[0].y),
    decode(codes, 8u, scale8[0].z), decode(codes, 12u, scale8[0].w),
    decode(codes, 16u, scale8[1].x), decode(codes, 20u, scale8[1].y),
    decode(codes, 24u, scale8[1].z), decode(codes, 28u, scale8[1].w),
  );
}

fn decode(codes: u32, shift: u32, scale: f32) -> f32 {
  return round_bf16(NF4[(codes >> shift) & 15u] * scale);
}
