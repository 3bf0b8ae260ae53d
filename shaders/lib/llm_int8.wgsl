// The second half of LLM.int8(): from the sum of the products of codes to an output, as bitsandbytes makes it on a CPU.
override STRIDE_OUT: u32;
override OUT_AT: u32; // column of y that output 0 makes
override HAS_BIAS: u32; // 0: `bias` is not read

const SCALES = 8; // where lib/weight_int8 binds SCB of each row of the weight

struct Params {
  rows: u32,
  outputs: u32, // rows of this weight
  first_output: u32, // the output that its first row makes
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> codes: array<vec2<u32>>; // [rows, WEIGHT_STRIDE / 4], of x
@group(0) @binding(3) var<storage, read> row_scale: array<f32>; // of each row of x
@group(0) @binding(4) var<storage, read> x: array<f32>; // [rows, WEIGHT_STRIDE]
@group(0) @binding(5) var<storage, read> outliers: array<u32>; // a bit for each column
@group(0) @binding(6) var<storage, read> bias: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

var<workgroup> outlier_word: atomic<u32>; // 0 where no column has an outlier; good after a barrier

fn outlier_words() -> u32 {
  return (WEIGHT_STRIDE + 31u) / 32u;
}

fn find_outliers(local: u32, lanes: u32) {
  for (var word = local; word < outlier_words(); word += lanes) {
    atomicOr(&outlier_word, outliers[word]);
  }
}

// y = bf16(total · (row_scale · SCB) · 1/127² + bias), and where there are outlier columns bf16(y + Σ x · weight over those,
// from first to last), both operands bfloat16.
fn store(row: u32, output: u32, total: i32) {
  if (row >= params.rows || output >= params.outputs) {
    return;
  }
  let column = params.first_output + output;
  var value = f32(total) * (row_scale[row] * scales[output]) * 6.200124e-5; // bitsandbytes' own 1 / 127²
  if (HAS_BIAS == 1u) {
    value = apart(value) + bias[column];
  }
  value = round_bf16(value);
  if (atomicLoad(&outlier_word) != 0u) {
    value = round_bf16(value + outlier_sum(row, output));
  }
  y[row * STRIDE_OUT + OUT_AT + column] = value;
}

// A compiler may join a product and the sum behind it into one rounding, and here there are two: it does not know that
// there are fewer than 2^31 rows.
fn apart(product: f32) -> f32 {
  return bitcast<f32>(bitcast<u32>(product) ^ (params.rows >> 31u));
}

fn outlier_sum(row: u32, output: u32) -> f32 {
  var sum = 0.0;
  for (var word = 0u; word < outlier_words(); word++) {
    for (var bits = outliers[word]; bits != 0u; bits &= bits - 1u) {
      let k = word * 32u + countTrailingZeros(bits);
      let codes8 = weight[output * (WEIGHT_STRIDE / 8u) + k / 8u];
      let codes4 = bitcast<i32>(select(codes8.x, codes8.y, k % 8u >= 4u));
      let w = decode(extractBits(codes4, (k % 4u) * 8u, 8u), scales[output]);
      sum = fma(round_bf16(x[row * WEIGHT_STRIDE + k]), w, sum);
    }
  }
  return sum;
}
