// Reductions over a workgroup by a tree in workgroup memory: for devices without subgroups. Every lane gets the result.
override WORKGROUP: u32; // a power of two: the tree halves it

var<workgroup> partial: array<f32, WORKGROUP>;

struct Lane {
  @builtin(local_invocation_index) index: u32,
}

fn workgroup_sum(value: f32, lane: Lane) -> f32 {
  partial[lane.index] = value;
  workgroupBarrier();
  for (var half = WORKGROUP / 2u; half > 0u; half /= 2u) {
    if (lane.index < half) {
      partial[lane.index] += partial[lane.index + half];
    }
    workgroupBarrier();
  }
  let result = partial[0];
  workgroupBarrier();
  return result;
}
