// The operands of attention, as both of its kernels read them.
override HEAD_DIM: u32;
override HEADS: u32;
override KV_HEADS: u32;
override STRIDE: u32; // of qkv
override SCALE: f32;

@group(0) @binding(1) var<storage, read> queries: array<Queries>;
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> keys: array<u32>;
@group(0) @binding(4) var<storage, read> values: array<u32>;

fn head_words() -> u32 {
  return (HEAD_DIM + 1u) / 2u;
}

// Where a cache slot's head begins, in words. Query heads share key heads evenly.
fn cache_at(slot: u32, head: u32) -> u32 {
  return (slot * KV_HEADS + head / (HEADS / KV_HEADS)) * head_words();
}
