// y[t, head] = Σ_j softmax_j(SCALE q[t, head] · k[j, head]) v[j, head] over the positions j up to the token's own
//
// A workgroup takes QUERIES neighbouring queries of one head through the keys, a chunk of KEYS at a time: the chunk
// passes through workgroup memory once for all its queries. qkv: [tokens, STRIDE]; y: [tokens, STRIDE_OUT]
override QUERIES: u32;
override STRIDE_OUT: u32;
override HEAD_WORDS: u32; // ceil(HEAD_DIM / 2)

const WORKGROUP = 64u;

@group(0) @binding(5) var<storage, read_write> y: array<f32>;

var<workgroup> query: array<f32, QUERIES * HEAD_DIM>;
var<workgroup> chunk: array<u32, KEYS * HEAD_WORDS>; // the keys, then the values
var<workgroup> weight: array<f32, QUERIES * KEYS>; // scores, then exp(score - the chunk's maximum)
var<workgroup> output: array<f32, QUERIES * HEAD_DIM>;
var<workgroup> maximum: array<f32, QUERIES>;
var<workgroup> total: array<f32, QUERIES>;
var<workgroup> keep: array<f32, QUERIES>; // factor of what earlier chunks gave
var<workgroup> gain: array<f32, QUERIES>; // factor of this chunk

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let run = queries[group.x];
  let head = group.y;

  for (var i = local; i < QUERIES * HEAD_DIM; i += WORKGROUP) {
    let token = run.first_token + min(i / HEAD_DIM, run.count - 1u);
    query[i] = qkv[token * STRIDE + head * HEAD_DIM + i % HEAD_DIM];
    output[i] = 0.0;
  }
  if (local < QUERIES) {
    maximum[local] = LOWEST;
    total[local] = 0.0;
  }

  let last_position = run.first_position + run.count - 1u;
  for (var first_key = 0u; first_key <= last_position; first_key += KEYS) {
    let keys_here = min(KEYS, last_position + 1u - first_key);

    workgroupBarrier();
    for (var i = local; i < keys_here * HEAD_WORDS; i += WORKGROUP) {
      chunk[i] = keys[cache_at(run.first_slot + first_key + i / HEAD_WORDS, head) + i % HEAD_WORDS];
    }
    workgroupBarrier();

    for (var i = local; i < QUERIES * KEYS; i += WORKGROUP) {
      weight[i] = score(i / KEYS, i % KEYS);
    }
    workgroupBarrier();

    if (local < run.count) {
      merge_statistics(local, visible(run, local, first_key));
    }
    workgroupBarrier();

    for (var i = local; i < keys_here * HEAD_WORDS; i += WORKGROUP) {
      chunk[i] = values[cache_at(run.first_slot + first_key + i / HEAD_WORDS, head) + i % HEAD_WORDS];
    }
    workgroupBarrier();

    for (var i = local; i < run.count * HEAD_DIM; i += WORKGROUP) {
      let q = i / HEAD_DIM;
      let here = visible(run, q, first_key);
      if (here > 0u) {
        output[i] = fma(weighted_value(q, i % HEAD_DIM, here), gain[q], output[i] * keep[q]);
      }
    }
  }
  workgroupBarrier();

  for (var i = local; i < run.count * HEAD_DIM; i += WORKGROUP) {
    let token = run.first_token + i / HEAD_DIM;
    y[token * STRIDE_OUT + head * HEAD_DIM + i % HEAD_DIM] = output[i] / total[i / HEAD_DIM];
  }
}

// How many keys of the chunk query q sees: those up to its own position.
fn visible(run: Queries, q: u32, first_key: u32) -> u32 {
  let position = run.first_position + q;
  return select(min(KEYS, position + 1u - first_key), 0u, position < first_key);
}

fn score(q: u32, key: u32) -> f32 {
  var sum = 0.0;
  for (var d = 0u; d < HEAD_DIM; d += 2u) {
    let word = chunk[key * HEAD_WORDS + d / 2u];
    sum = fma(query[q * HEAD_DIM + d], unpack_low(word), sum);
    if (d + 1u < HEAD_DIM) {
      sum = fma(query[q * HEAD_DIM + d + 1u], unpack_high(word), sum);
    }
  }
  return sum * SCALE;
}

// Turns the chunk's scores into weights and merges its maximum and sum into the query's.
fn merge_statistics(q: u32, here: u32) {
  if (here == 0u) {
    return;
  }
  var chunk_maximum = LOWEST;
  for (var j = 0u; j < here; j++) {
    chunk_maximum = max(chunk_maximum, weight[q * KEYS + j]);
  }
  var chunk_total = 0.0;
  for (var j = 0u; j < here; j++) {
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

fn weighted_value(q: u32, dim: u32, here: u32) -> f32 {
  var sum = 0.0;
  for (var j = 0u; j < here; j++) {
    let word = chunk[j * HEAD_WORDS + dim / 2u];
    sum = fma(weight[q * KEYS + j], select(unpack_low(word), unpack_high(word), dim % 2u == 1u), sum);
  }
  return sum;
}
