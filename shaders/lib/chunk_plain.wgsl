// As chunk_lanes8, through workgroup memory.
const LANES = 8u;

struct Lane {
  @builtin(local_invocation_index) index: u32,
}

var<workgroup> of_lanes: array<f32, KEYS>;

fn query_value(query: u32, d: u32, lane: Lane) -> f32 {
  return qkv[query + d];
}

fn largest_of_all(mine: vec4<f32>, lane: Lane) -> f32 {
  keep_weights(mine, lane);
  var largest = of_lanes[0];
  for (var j = 1u; j < KEYS; j++) {
    largest = max(largest, of_lanes[j]);
  }
  return largest;
}

fn keep_weights(mine: vec4<f32>, lane: Lane) {
  workgroupBarrier(); // what was here before has been read
  of_lanes[lane.index] = mine.x;
  of_lanes[lane.index + LANES] = mine.y;
  of_lanes[lane.index + 2u * LANES] = mine.z;
  of_lanes[lane.index + 3u * LANES] = mine.w;
  workgroupBarrier();
}

fn weight_of(j: u32) -> f32 {
  return of_lanes[j];
}
