enable subgroups;

// What the eight lanes of a workgroup have in common while they take a query through a chunk of keys, handed about within
// their subgroup. A lane has the keys lane, lane + 8, lane + 16 and lane + 24 of the chunk.
const LANES = 8u;

struct Lane {
  @builtin(subgroup_invocation_id) index: u32,
}

var<private> query_part: f32;
var<private> my_weights: vec4<f32>;

// Dimension d of a query that begins at `query`. Asked for from 0 on, one after another, by all lanes.
fn query_value(query: u32, d: u32, lane: Lane) -> f32 {
  if (d % LANES == 0u) {
    query_part = qkv[query + min(d + lane.index, HEAD_DIM - 1u)];
  }
  return subgroupShuffle(query_part, d % LANES);
}

fn largest_of_all(mine: vec4<f32>, lane: Lane) -> f32 {
  let my_largest = max(max(mine.x, mine.y), max(mine.z, mine.w));
  let of_two = max(my_largest, subgroupShuffleXor(my_largest, 1u));
  let of_four = max(of_two, subgroupShuffleXor(of_two, 2u));
  return max(of_four, subgroupShuffleXor(of_four, 4u));
}

fn keep_weights(mine: vec4<f32>, lane: Lane) {
  my_weights = mine;
}

// The weight of key j of the chunk. For all lanes the same j.
fn weight_of(j: u32) -> f32 {
  return subgroupShuffle(my_weights[j / LANES], j % LANES);
}
