// (a, b) = (a cos - b sin, b cos + a sin): rotary positions, for some neighbouring heads of each token
//
// a: the first PAIRS dimensions of a head, b: the next PAIRS; those behind stay as they are. Where INTERLEAVED is 1, a and b
// are neighbours instead. x: [tokens, STRIDE], in place.
// angles: [positions, ANGLE_STRIDE], per position PAIRS cosines, then PAIRS sines: the host makes them, for WGSL promises
// only 2⁻¹¹ for its own. One invocation turns one pair.
override HEADS: u32;
override HEAD_STRIDE: u32; // from one head to the next
override FIRST: u32; // column of the first head
override PAIRS: u32;
override INTERLEAVED: u32;
override STRIDE: u32;
override ANGLE_STRIDE: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> tokens: array<vec2<u32>>; // id, position
@group(0) @binding(2) var<storage, read> angles: array<f32>;
@group(0) @binding(3) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= HEADS * PAIRS) {
    return;
  }
  let pair = id.x % PAIRS;
  let angle = tokens[id.y].y * ANGLE_STRIDE + pair;
  let cosine = angles[angle];
  let sine = angles[angle + PAIRS];
  let head = id.y * STRIDE + FIRST + (id.x / PAIRS) * HEAD_STRIDE;
  let at = head + select(pair, 2u * pair, INTERLEAVED == 1u);
  let other = at + select(PAIRS, 1u, INTERLEAVED == 1u);
  let a = x[at];
  let b = x[other];
  x[at] = fma(a, cosine, -(b * sine));
  x[other] = fma(b, cosine, a * sine);
}
