// y[t, head] = Σ_j softmax_j(SCALE q[t, head] · k[j, head]) v[j, head] over the positions j up to the token's own
//
// A workgroup takes up to QUERIES neighbouring queries of one head through the keys, a chunk of KEYS at a time: the chunk
// passes through workgroup memory once for all its queries, SLICE_WORDS of each key and value at a time, so that there is
// room for large heads. It takes the runs from params.first_run on, and group.z the part of a run that has more queries.
// qkv: [tokens, STRIDE]; y: [tokens, STRIDE_OUT]
override QUERIES: u32;
override STRIDE_OUT: u32;
override HEAD_WORDS: u32; // ceil(HEAD_DIM / 2)
override SLICE_WORDS: u32; // at most HEAD_WORDS

const WORKGROUP = 64u;

struct Params {
  first_run: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

var<workgroup> query: array<f32, QUERIES * HEAD_DIM>;
var<workgroup> chunk: array<u32, KEYS * SLICE_WORDS>; // a slice of the keys, then of the values
var<workgroup> weight: array<f32, QUERIES * KEYS>; // scores, then exp(score - the chunk's maximum)
var<workgroup> output: array<f32, QUERIES * HEAD_DIM>;
var<workgroup> maximum: array<f32, QUERIES>;
var<workgroup> total: array<f32, QUERIES>;
var<workgroup> keep: array<f32, QUERIES>; // factor of what earlier chunks gave
var<workgroup> gain: array<f32, QUERIES>; // factor of this chunk

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  var run = queries[params.first_run + group.x];
  let head = group.y;
  let skipped = group.z * QUERIES;
  if (skipped >= run.count) {
    return;
  }
  run.first_token += skipped;
  run.first_position += skipped;
  run.count = min(run.count - skipped, QUERIES);

  for (var i = local; i < QUERIES * HEAD_DIM; i += WORKGROUP) {
    let token = run.first_token + min(i / HEAD_DIM, run.count - 1u);
    query[i] = qkv[query_at(token, head) + i % HEAD_DIM];
    output[i] = 0.0;
  }
  if (local < QUERIES) {
    maximum[local] = LOWEST;
    total[local] = 0.0;
  }

  let last_position = run.first_position + run.count - 1u;
  for (var first_key = first_visible(run.first_position) / KEYS * KEYS; first_key <= last_position; first_key += KEYS) {
    let keys_here = min(KEYS, last_position + 1u - first_key);

    for (var slice = 0u; slice < HEAD_WORDS; slice += SLICE_WORDS) {
      let words = min(SLICE_WORDS, HEAD_WORDS - slice);
      workgroupBarrier();
      for (var i = local; i < keys_here * words; i += WORKGROUP) {
        let key = i / words;
        chunk[key * SLICE_WORDS + i % words] = keys[cache_at(run, first_key + key, head) + slice + i % words];
      }
      workgroupBarrier();
      for (var i = local; i < QUERIES * KEYS; i += WORKGROUP) {
        let sum = add_products(select(weight[i], 0.0, slice == 0u), i / KEYS, i % KEYS, slice, words);
        weight[i] = sum;
        if (slice + words == HEAD_WORDS) {
          weight[i] = score_of(sum);
        }
      }
    }
    workgroupBarrier();

    if (local < run.count) {
      merge_statistics(local, visible(run, local, first_key));
    }

    for (var slice = 0u; slice < HEAD_WORDS; slice += SLICE_WORDS) {
      let words = min(SLICE_WORDS, HEAD_WORDS - slice);
      workgroupBarrier();
      for (var i = local; i < keys_here * words; i += WORKGROUP) {
        let key = i / words;
        chunk[key * SLICE_WORDS + i % words] = values[cache_at(run, first_key + key, head) + slice + i % words];
      }
      workgroupBarrier();
      let dims = min(words * 2u, HEAD_DIM - slice * 2u);
      for (var i = local; i < run.count * dims; i += WORKGROUP) {
        let q = i / dims;
        let dim = i % dims;
        let here = visible(run, q, first_key);
        if (here.x < here.y) {
          let at = q * HEAD_DIM + slice * 2u + dim;
          output[at] = fma(weighted_value(q, dim, here), gain[q], output[at] * keep[q]);
        }
      }
    }
  }
  workgroupBarrier();

  for (var i = local; i < run.count * HEAD_DIM; i += WORKGROUP) {
    let token = run.first_token + i / HEAD_DIM;
    y[token * STRIDE_OUT + head * HEAD_DIM + i % HEAD_DIM] = output[i] / total[i / HEAD_DIM];
  }
}

// The keys of the chunk that query q sees, from the first to before the second: those of its window up to its own position.
fn visible(run: Queries, q: u32, first_key: u32) -> vec2<u32> {
  let position = run.first_position + q;
  let first = max(first_visible(position), first_key);
  let end = min(first_key + KEYS, position + 1u);
  return vec2<u32>(min(first, end), end) - min(first_key, end);
}

fn add_products(before: f32, q: u32, key: u32, slice: u32, words: u32) -> f32 {
  var sum = before;
  for (var w = 0u; w < words; w++) {
    let word = chunk[key * SLICE_WORDS + w];
    let d = (slice + w) * 2u;
    sum = fma(query[q * HEAD_DIM + d], unpack_low(word), sum);
    if (d + 1u < HEAD_DIM) {
      sum = fma(query[q * HEAD_DIM + d + 1u], unpack_high(word), sum);
    }
  }
  return sum;
}

// Turns the chunk's scores into weights, and merges its maximum and total into the query's.
fn merge_statistics(q: u32, here: vec2<u32>) {
  if (here.x >= here.y) {
    return;
  }
  var chunk_maximum = LOWEST;
  for (var j = here.x; j < here.y; j++) {
    chunk_maximum = max(chunk_maximum, weight[q * KEYS + j]);
  }
  var chunk_total = 0.0;
  for (var j = here.x; j < here.y; j++) {
    let w = exp(weight[q * KEYS + j] - chunk_maximum);
    weight[q * KEYS + j] = w;
    chunk_total += w;
  }
  let merged = max(maximum[q], chunk_maximum);
  keep[q] = exp(maximum[q] - merged);
  gain[q] = exp(chunk_maximum - merged);
  total[q] = fma(chunk_total, gain[q], total[q] * keep[q]);
  maximum[q] = merged;
}

fn weighted_value(q: u32, dim: u32, here: vec2<u32>) -> f32 {
  var sum = 0.0;
  for (var j = here.x; j < here.y; j++) {
    let word = chunk[j * SLICE_WORDS + dim / 2u];
    sum = fma(weight[q * KEYS + j], select(unpack_low(word), unpack_high(word), dim % 2u == 1u), sum);
  }
  return sum;
}
