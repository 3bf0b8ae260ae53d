// y[t, :] = bf16(SCALE · token_table[id[t], :])
//
// token_table: the rows [first_id, first_id + ids) of the embedding; tokens of other rows are left to another dispatch.
// token_table: [rows, STRIDE] bfloat16, two to a word; y: [tokens, STRIDE]. One invocation makes two columns.
override STRIDE: u32;
override SCALE: f32;
override WORKGROUP: u32;

struct Params {
  first_id: u32,
  ids: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec2<u32>>; // id, position
@group(0) @binding(2) var<storage, read> token_table: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<vec2<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) invocation: vec3<u32>) {
  let column2 = invocation.x;
  let token = invocation.y;
  let id = tokens[token].x - params.first_id; // wraps far above `ids` for an earlier row
  if (column2 >= STRIDE / 2u || id >= params.ids) {
    return;
  }
  let word = token_table[id * (STRIDE / 2u) + column2];
  y[token * (STRIDE / 2u) + column2] = vec2<f32>(
    round_bf16(unpack_low(word) * SCALE),
    round_bf16(unpack_high(word) * SCALE),
  );
}
