enable subgroups;
requires subgroup_id;

// Reductions over a workgroup by subgroups of whatever size the device chose. Every lane gets the result.
override WORKGROUP: u32;

var<workgroup> subgroup_partial: array<f32, WORKGROUP>;

struct Lane {
  @builtin(local_invocation_index) index: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(num_subgroups) subgroups: u32,
}

fn workgroup_sum(value: f32, lane: Lane) -> f32 {
  let total = subgroupAdd(value);
  if (subgroupElect()) {
    subgroup_partial[lane.subgroup] = total;
  }
  workgroupBarrier();
  var result = 0.0;
  for (var i = 0u; i < lane.subgroups; i++) {
    result += subgroup_partial[i];
  }
  workgroupBarrier();
  return result;
}
