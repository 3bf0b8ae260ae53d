// The operands of attention, as both of its kernels read them.
override HEAD_DIM: u32;
override HEADS: u32;
override KV_HEADS: u32;
override STRIDE: u32; // of qkv
override HEAD_STRIDE: u32; // columns from one query head to the next
override SCALE: f32;
override SOFTCAP: f32; // of the scores; 0: none

@group(0) @binding(1) var<storage, read> queries: array<Queries>;
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> keys: array<u32>;
@group(0) @binding(4) var<storage, read> values: array<u32>;
@group(0) @binding(5) var<storage, read> pages: array<u32>;

// Where a token's query of a head begins in qkv.
fn query_at(token: u32, head: u32) -> u32 {
  return token * STRIDE + head * HEAD_STRIDE;
}

// What a sum of products q·k becomes.
fn score_of(sum: f32) -> f32 {
  if (SOFTCAP > 0.0) {
    return soft_cap(sum * SCALE, SOFTCAP);
  }
  return sum * SCALE;
}

fn head_words() -> u32 {
  return (HEAD_DIM + 1u) / 2u;
}

// Where a head of a position begins in the cache, in words. A page holds one chunk of KEYS positions. Query heads share
// key heads evenly.
fn cache_at(run: Queries, position: u32, head: u32) -> u32 {
  let slot = pages[run.first_page + position / KEYS] * KEYS + position % KEYS;
  return (slot * KV_HEADS + head / (HEADS / KV_HEADS)) * head_words();
}
