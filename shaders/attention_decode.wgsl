// What one chunk of KEYS keys gives to one query of one head: maximum, sum and weighted values, for attention_merge
//
// One workgroup per (query, head, chunk), so that a single token keeps a device busy. A lane takes one key for the
// scores, then one or more dimensions of the head for the values. The runs from params.first_run on are of one query each.
// partial: [queries, HEADS, chunks, HEAD_DIM + 2]: maximum, sum, values. The arithmetic is that of attention_prefill.
struct Params {
  chunks: u32, // of the longest sequence
  first_run: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(6) var<storage, read_write> partial: array<f32>;

var<workgroup> weight: array<f32, KEYS>;
var<workgroup> maximum: f32;

@compute @workgroup_size(KEYS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let run = queries[params.first_run + group.x];
  let head = group.y;
  let first_key = group.z * KEYS;
  let first = first_visible(run.first_position);
  if (first_key > run.first_position || first_key + KEYS <= first) {
    return;
  }
  // Of the chunk the query sees the keys from begin to before end.
  let begin = max(first, first_key) - first_key;
  let end = min(KEYS, run.first_position + 1u - first_key);
  let at = ((group.x * HEADS + head) * params.chunks + group.z) * (HEAD_DIM + 2u);

  if (lane >= begin && lane < end) {
    weight[lane] = score(run, head, cache_at(run, first_key + lane, head));
  }
  workgroupBarrier();

  if (lane == 0u) {
    maximum = LOWEST;
    for (var j = begin; j < end; j++) {
      maximum = max(maximum, weight[j]);
    }
  }
  workgroupBarrier();
  if (lane >= begin && lane < end) {
    weight[lane] = exp(weight[lane] - maximum);
  }
  workgroupBarrier();

  if (lane == 0u) {
    var total = 0.0;
    for (var j = begin; j < end; j++) {
      total += weight[j];
    }
    partial[at] = maximum;
    partial[at + 1u] = total;
  }
  for (var dim = lane; dim < HEAD_DIM; dim += KEYS) {
    var sum = 0.0;
    for (var j = begin; j < end; j++) {
      let word = values[cache_at(run, first_key + j, head) + dim / 2u];
      sum = fma(weight[j], select(unpack_low(word), unpack_high(word), dim % 2u == 1u), sum);
    }
    partial[at + 2u + dim] = sum;
  }
}

fn score(run: Queries, head: u32, key: u32) -> f32 {
  let query = query_at(run.first_token, head);
  var sum = 0.0;
  for (var d = 0u; d < HEAD_DIM; d += 2u) {
    let word = keys[key + d / 2u];
    sum = fma(qkv[query + d], unpack_low(word), sum);
    if (d + 1u < HEAD_DIM) {
      sum = fma(qkv[query + d + 1u], unpack_high(word), sum);
    }
  }
  return score_of(sum);
}
