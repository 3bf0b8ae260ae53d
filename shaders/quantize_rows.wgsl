// row_scale[row] = the largest float16(bf16(x[row, k])) in magnitude that is no outlier
// codes[row, k] = round_half_even(float16(bf16(x[row, k])) · (127 / row_scale[row])), 0 in outlier columns
//
// One workgroup per row. x: [rows, STRIDE]; outliers: a bit for each column; codes: [rows, STRIDE / 4], four to a word as
// lib/weight_int8 has them. A value that is no outlier counts for the scale even where its column has one elsewhere.
override STRIDE: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> outliers: array<u32>;
@group(0) @binding(3) var<storage, read_write> codes: array<u32>;
@group(0) @binding(4) var<storage, read_write> row_scale: array<f32>;

var<workgroup> largest: atomic<u32>; // the bits of a magnitude: they order as their values do, NaN above all

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let row = group.x;
  let first = row * (STRIDE / 4u);

  var mine = 0u;
  for (var k4 = local; k4 < STRIDE / 4u; k4 += WORKGROUP) {
    let x4 = x[first + k4];
    mine = max(max(mine, max(magnitude(x4.x), magnitude(x4.y))), max(magnitude(x4.z), magnitude(x4.w)));
  }
  atomicMax(&largest, mine);
  workgroupBarrier();

  let scale = bitcast<f32>(atomicLoad(&largest));
  let factor = reciprocal_127(scale);
  for (var k4 = local; k4 < STRIDE / 4u; k4 += WORKGROUP) {
    let x4 = x[first + k4];
    let skipped = outliers[k4 / 8u] >> ((k4 % 8u) * 4u);
    codes[first + k4] = code(x4.x, factor, skipped, 0u)
      | code(x4.y, factor, skipped, 1u)
      | code(x4.z, factor, skipped, 2u)
      | code(x4.w, factor, skipped, 3u);
  }
  if (local == 0u) {
    row_scale[row] = scale;
  }
}

fn magnitude(value: f32) -> u32 {
  return select(bitcast<u32>(round_f16(round_bf16(value))) & 0x7fffffffu, 0u, is_outlier(value));
}

fn code(value: f32, factor: f32, skipped: u32, place: u32) -> u32 {
  if (((skipped >> place) & 1u) == 1u) {
    return 0u;
  }
  return (bitcast<u32>(i32(round(round_f16(round_bf16(value)) * factor))) & 0xffu) << (8u * place);
}

// A bfloat16 value below 6 as float16 holds it: below 2^-14 that has only multiples of 2^-24 left.
fn round_f16(value: f32) -> f32 {
  return select(value, round(value * 16777216.0) * 5.9604644775390625e-8, abs(value) < 6.103515625e-5);
}

// 127 / scale as torch divides: 1 / scale to the nearest float32, times 127. It decides which way half a code rounds, and
// a WGSL division may be off by more than half a unit in the last place. So the reciprocal is made of integers:
// scale = m · 2^e with m from 128 to 255, since it has the digits of a bfloat16 value, and 2^31 / m has 24 digits. It never
// lies halfway between two integers, for m has fewer factors of two than 2^32.
fn reciprocal_127(scale: f32) -> f32 {
  let bits = bitcast<u32>(scale);
  if (bits == 0u) {
    return 0.0;
  }
  let m = 128u + ((bits >> 16u) & 127u);
  let quotient = 0x80000000u / m;
  let rest = 0x80000000u - quotient * m;
  let digits = quotient + select(0u, 1u, 2u * rest > m);
  // Of a scale from 2^-24 to 6, biased exponents 103 to 129: 1 / scale = digits · 2^(103 - exponent), exactly.
  let power = bitcast<f32>((230u - min(bits >> 23u, 229u)) << 23u);
  return f32(digits) * power * 127.0;
}
