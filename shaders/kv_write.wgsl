// The keys and values of new tokens enter the cache, rounded to bfloat16.
// qkv: [tokens, STRIDE]; the heads of the keys lie HEAD_STRIDE columns apart, and so do those of the values
// keys, values: [slots, KV_HEADS, HEAD_WORDS], two values to a word; a head of odd size ends with a zero
override STRIDE: u32;
override KV_HEADS: u32;
override HEAD_DIM: u32;
override HEAD_STRIDE: u32;
override KEYS_AT: u32; // column of the first key in qkv
override VALUES_AT: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> slots: array<u32>; // where each token goes
@group(0) @binding(3) var<storage, read_write> keys: array<u32>;
@group(0) @binding(4) var<storage, read_write> values: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let head_words = (HEAD_DIM + 1u) / 2u;
  let token = id.y;
  let word = id.x;
  if (word >= KV_HEADS * head_words) {
    return;
  }
  let head = word / head_words;
  let dim = (word % head_words) * 2u;
  let at = token * STRIDE + head * HEAD_STRIDE + dim;
  let has_second = dim + 1u < HEAD_DIM;
  let slot = slots[token] * KV_HEADS * head_words + word;
  keys[slot] = pack_bf16(qkv[at + KEYS_AT], select(0.0, qkv[at + KEYS_AT + 1u], has_second));
  values[slot] = pack_bf16(qkv[at + VALUES_AT], select(0.0, qkv[at + VALUES_AT + 1u], has_second));
}
