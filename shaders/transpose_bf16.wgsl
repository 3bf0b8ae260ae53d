// y[n - first_out, first_in + k] = x[k, n]: a piece of a weight that its file keeps as [in, out], on its way to [out, in]
//
// x: [ins, IN_STRIDE] bfloat16, two to a word; y: [outs, OUT_STRIDE] bfloat16, eight to a vec4. first_in is a multiple
// of 8. One invocation takes eight rows of one word of x, which are eight columns of two rows of y: lanes run along n,
// so that x is read in order. What is behind the last row of x is zero in y.
override IN_STRIDE: u32; // elements of a row of x, even
override OUT_STRIDE: u32; // elements of a row of y, a multiple of 8
override WORKGROUP: u32;

struct Params {
  ins: u32, // rows of x
  first_in: u32,
  first_out: u32,
  outs: u32, // rows of y
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<u32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let word = params.first_out / 2u + id.x;
  let k = id.y * 8u;
  let n = word * 2u;
  let end_out = params.first_out + params.outs;
  if (n >= end_out) {
    return;
  }
  let even = vec4(word_at(k, word), word_at(k + 2u, word), word_at(k + 4u, word), word_at(k + 6u, word));
  let odd = vec4(word_at(k + 1u, word), word_at(k + 3u, word), word_at(k + 5u, word), word_at(k + 7u, word));
  let column = (params.first_in + k) / 8u;
  if (n >= params.first_out) {
    y[(n - params.first_out) * (OUT_STRIDE / 8u) + column] = (even & vec4(0xffffu)) | (odd << vec4(16u));
  }
  if (n + 1u < end_out) {
    y[(n + 1u - params.first_out) * (OUT_STRIDE / 8u) + column] = (even >> vec4(16u)) | (odd & vec4(0xffff0000u));
  }
}

fn word_at(k: u32, word: u32) -> u32 {
  if (k >= params.ins) {
    return 0u;
  }
  return x[k * (IN_STRIDE / 2u) + word];
}
