// y[t, head] = Σ_j softmax_j(SCALE q[t, head] · k[j, head]) v[j, head] over the positions j up to the token's own, on a CPU
//
// For software devices, to which barriers and workgroup memory are dear: a workgroup of as many lanes as a CPU has takes
// one query of one head through the keys, a chunk of KEYS at a time. A lane makes the scores of four keys at once, then
// the sums of up to four pairs of dimensions. group.x is the query's place in its run; heads come last, for a driver gives
// each of its threads as many neighbouring workgroups, and heads all cost the same. The arithmetic is that of
// attention_prefill.
// qkv: [tokens, STRIDE]; y: [tokens, STRIDE_OUT]
override STRIDE_OUT: u32;

struct Params {
  first_run: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

var<workgroup> output: array<f32, HEAD_DIM>; // a lane looks at nobody else's dimensions

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
  let run = queries[params.first_run + group.y];
  if (group.x >= run.count) {
    return;
  }
  let token = run.first_token + group.x;
  let position = run.first_position + group.x;
  let head = group.z;
  let first = first_visible(position);

  var maximum = LOWEST;
  var total = 0.0;
  for (var first_key = first / KEYS * KEYS; first_key <= position; first_key += KEYS) {
    // Of the chunk the query sees the keys from begin to before end. A lane whose keys are others takes one of these again.
    let begin = max(first, first_key) - first_key;
    let end = min(KEYS, position + 1u - first_key);
    let at = cache_at(run, first_key, head);
    let mine = clamp(fours(lane.index), vec4<u32>(begin), vec4<u32>(end - 1u));
    let scores = four_scores(query_at(token, head), at + mine * key_words(), lane);
    let chunk_maximum = largest_of_all(scores, lane);
    keep_weights(exp(scores - chunk_maximum), lane);

    let merged = max(maximum, chunk_maximum);
    let factors = exp(vec2<f32>(maximum, chunk_maximum) - merged); // of what earlier chunks gave, and of this one
    var chunk_total = 0.0;
    for (var word = 0u; word < head_words(); word += 4u * LANES) {
      chunk_total = add_values(at, fours(word + lane.index), begin, end, factors);
    }
    total = fma(chunk_total, factors.y, total * factors.x);
    maximum = merged;
  }

  for (var dim = 2u * lane.index; dim < HEAD_DIM; dim += 2u * LANES) {
    let column = token * STRIDE_OUT + head * HEAD_DIM + dim;
    y[column] = output[dim] / total;
    if (dim + 1u < HEAD_DIM) {
      y[column + 1u] = output[dim + 1u] / total;
    }
  }
}

fn fours(first: u32) -> vec4<u32> {
  return first + vec4<u32>(0u, LANES, 2u * LANES, 3u * LANES);
}

// Words from one position of the cache to the next.
fn key_words() -> u32 {
  return KV_HEADS * head_words();
}

// One query with the four keys that begin at `at`.
fn four_scores(query: u32, at: vec4<u32>, lane: Lane) -> vec4<f32> {
  var sums = vec4<f32>();
  for (var d = 0u; d < HEAD_DIM; d += 2u) {
    let here = at + d / 2u;
    let words = vec4<u32>(keys[here.x], keys[here.y], keys[here.z], keys[here.w]);
    sums = fma(vec4<f32>(query_value(query, d, lane)), low_halves(words), sums);
    if (d + 1u < HEAD_DIM) {
      sums = fma(vec4<f32>(query_value(query, d + 1u, lane)), high_halves(words), sums);
    }
  }
  return vec4<f32>(score_of(sums.x), score_of(sums.y), score_of(sums.z), score_of(sums.w));
}

// Merges the chunk's weighted values into the pairs of dimensions that these words are, as far as the head has them. Gives
// the sum of the weights.
fn add_values(at: u32, word: vec4<u32>, begin: u32, end: u32, factors: vec2<f32>) -> f32 {
  let mine = at + min(word, vec4<u32>(head_words() - 1u));
  var low = vec4<f32>();
  var high = vec4<f32>();
  var total = 0.0;
  for (var j = begin; j < end; j++) {
    let weight = weight_of(j);
    let here = mine + j * key_words();
    let words = vec4<u32>(values[here.x], values[here.y], values[here.z], values[here.w]);
    low = fma(vec4<f32>(weight), low_halves(words), low);
    high = fma(vec4<f32>(weight), high_halves(words), high);
    total += weight;
  }
  for (var i = 0u; i < 4u; i++) {
    merge(2u * word[i], low[i], factors);
    merge(2u * word[i] + 1u, high[i], factors);
  }
  return total;
}

fn merge(dim: u32, sum: f32, factors: vec2<f32>) {
  if (dim < HEAD_DIM) {
    output[dim] = fma(sum, factors.y, output[dim] * factors.x);
  }
}

fn low_halves(words: vec4<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>(words << vec4<u32>(16u));
}

fn high_halves(words: vec4<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>(words & vec4<u32>(0xffff0000u));
}
