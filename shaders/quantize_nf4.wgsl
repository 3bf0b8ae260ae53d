// codes = the NF4 code of each weight: how many thresholds lie strictly below weight * (1 / max(absmax, 1e-38)), with the
// absmax of its block
//
// x: [rows, X_STRIDE] bfloat16, two to a word, of which COLUMNS count; absmax: one per 64 values of the matrix laid out
// row after row. codes: [rows, X_STRIDE / 8], as lib/weight_4bit reads them. One invocation makes one word.
// No bfloat16 weight comes within 14 units in the last place of a threshold (all mantissas tried), so the rounding of
// a quotient changes no code. Quotients are made of mantissas and exponents: a device may take subnormal numbers for zero.
override COLUMNS: u32;
override X_STRIDE: u32;
override WORKGROUP: u32;

struct Params {
  rows: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> absmax: array<f32>;
@group(0) @binding(3) var<storage, read_write> codes: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let column8 = id.x;
  let row = id.y;
  if (column8 >= X_STRIDE / 8u || row >= params.rows) {
    return;
  }
  let word = row * (X_STRIDE / 8u) + column8;
  let first = row * COLUMNS + column8 * 8u;
  let words = x[word];
  codes[word] = code(words.x & 0xffffu, first)
    | (code(words.x >> 16u, first + 1u) << 4u)
    | (code(words.y & 0xffffu, first + 2u) << 8u)
    | (code(words.y >> 16u, first + 3u) << 12u)
    | (code(words.z & 0xffffu, first + 4u) << 16u)
    | (code(words.z >> 16u, first + 5u) << 20u)
    | (code(words.w & 0xffffu, first + 6u) << 24u)
    | (code(words.w >> 16u, first + 7u) << 28u);
}

fn code(half: u32, index: u32) -> u32 {
  let largest = bitcast<u32>(absmax[min(index / 64u, arrayLength(&absmax) - 1u)]) >> 16u;
  let magnitude = scaled(half & 0x7fffu, largest);
  return code_of(select(magnitude, -magnitude, half >> 15u == 1u));
}

const SMALLEST = 0x6cu; // the bfloat16 patterns up to this one lie below 1e-38

// magnitude / max(largest, 1e-38), of bfloat16 patterns; magnitude is not above largest
fn scaled(magnitude: u32, largest: u32) -> f32 {
  if (largest <= SMALLEST) {
    return f32(magnitude) * 0.0091835502; // subnormal numbers: magnitude * 2^-133 / 1e-38
  }
  let exponent = i32(exponent_of(magnitude)) - i32(exponent_of(largest));
  if (exponent < -100) {
    return 0.0;
  }
  return f32(mantissa_of(magnitude)) / f32(mantissa_of(largest)) * bitcast<f32>(u32(exponent + 127) << 23u);
}

// A pattern is mantissa * 2^(exponent - 134).
fn exponent_of(pattern: u32) -> u32 {
  return max(pattern >> 7u, 1u);
}

fn mantissa_of(pattern: u32) -> u32 {
  return (pattern & 0x7fu) | select(0x80u, 0u, pattern < 0x80u);
}

// Four comparisons find the number of thresholds below.
fn code_of(s: f32) -> u32 {
  if (s > 0.03979015) {
    if (s > 0.38931254) {
      if (s > 0.6427869) {
        return select(14u, 15u, s > 0.86147845);
      }
      return select(12u, 13u, s > 0.50166345);
    }
    if (s > 0.20352125) {
      return select(10u, 11u, s > 0.29201377);
    }
    return select(8u, 9u, s > 0.12025525);
  }
  if (s > -0.33967943) {
    if (s > -0.13791173) {
      return select(6u, 7u, s > -0.045525018);
    }
    return select(4u, 5u, s > -0.2346074);
  }
  if (s > -0.6106329) {
    return select(2u, 3u, s > -0.45999527);
  }
  return select(0u, 1u, s > -0.8480964);
}
