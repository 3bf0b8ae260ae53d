// y[n - first_out, first_in + k] = x[k, n]: a piece of a weight that its file keeps as [in, out], on its way to [out, in]
//
// x: [ins, IN_STRIDE] bfloat16, two to a word; y: [outs, OUT_STRIDE] bfloat16. first_in is even, so a word of y holds
// the columns k and k + 1 of one row. One invocation makes one word; lanes run along n, so that x is read in order.
override IN_STRIDE: u32; // elements of a row of x, even
override OUT_STRIDE: u32; // elements of a row of y, even
override WORKGROUP: u32;

struct Params {
  ins: u32, // rows of x
  first_in: u32,
  first_out: u32,
  outs: u32, // rows of y
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = id.x;
  let k = id.y * 2u;
  if (row >= params.outs) {
    return;
  }
  let n = params.first_out + row;
  let first = half_at(k * IN_STRIDE + n);
  var second = 0u;
  if (k + 1u < params.ins) {
    second = half_at((k + 1u) * IN_STRIDE + n);
  }
  y[(row * OUT_STRIDE + params.first_in + k) / 2u] = first | (second << 16u);
}

fn half_at(element: u32) -> u32 {
  return (x[element / 2u] >> ((element % 2u) * 16u)) & 0xffffu;
}
