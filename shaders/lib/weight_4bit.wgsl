// Weights in four bits (bitsandbytes, functional.py): a weight is the value of its code, by a lib/code_*.wgsl, times the
// absmax of its block, rounded to bfloat16.
// Eight codes to a word, the first in the lowest bits: [rows, WEIGHT_STRIDE / 8]. A block is 64 neighbours of the matrix
// laid out row after row, so it may begin in one row and end in another.
override WEIGHT_STRIDE: u32; // columns of a stored row, a multiple of 8
override COLUMNS: u32; // columns of the matrix

@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(SCALES) var<storage, read> scales: array<f32>; // absmax of each block

// 32 neighbours of one row, from column 32 * column32 on: one load each of codes and absmax, where rows are whole blocks.
struct Run {
  codes: vec4<u32>,
  scale: f32,
}

fn weight_run(row: u32, column32: u32) -> Run {
  if (COLUMNS % 64u != 0u) {
    return Run();
  }
  let at = row * (COLUMNS / 32u) + column32;
  return Run(weight[at], scales[at / 2u]);
}

// Eight of them, from column 8 * column8 on.
fn run8(run: Run, row: u32, column8: u32) -> mat2x4<f32> {
  if (COLUMNS % 64u != 0u) {
    return weight8(row, column8);
  }
  return decode8(run.codes[column8 % 4u], mat2x4<f32>(vec4<f32>(run.scale), vec4<f32>(run.scale)));
}

// Eight neighbours of one row, from column 8 * column8 on.
fn weight8(row: u32, column8: u32) -> mat2x4<f32> {
  let word = row * (WEIGHT_STRIDE / 8u) + column8;
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
  return decode8(weight[word / 4u][word % 4u], scale8);
}

fn decode8(codes: u32, scale8: mat2x4<f32>) -> mat2x4<f32> {
  return mat2x4<f32>(
    decode(codes, scale8[0].x), decode(codes >> 4u, scale8[0].y),
    decode(codes >> 8u, scale8[0].z), decode(codes >> 12u, scale8[0].w),
    decode(codes >> 16u, scale8[1].x), decode(codes >> 20u, scale8[1].y),
    decode(codes >> 24u, scale8[1].z), decode(codes >> 28u, scale8[1].w),
  );
}

// The lowest four bits. Rounded as by `round_bf16`, without its case for NaN: absmax is a number.
fn decode(code: u32, scale: f32) -> f32 {
  let bits = bitcast<u32>(code_value(code) * scale);
  return bitcast<f32>((bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u);
}
