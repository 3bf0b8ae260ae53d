// choice[t, i], weight[t, i] = the CHOSEN experts of token t, the best first, and what the output of each counts
//
// One workgroup per token. An expert's score is the softmax or the sigmoid of its logit. Experts are chosen by score +
// bias, from the TOP_GROUPS best of GROUPS groups of neighbours; a group is worth its best expert, or its best two added
// up (GROUP_BEST). Of equals the lowest number goes first. The weight is the score without bias, divided by the sum of
// those chosen where NORMALIZE is 1, times SCALE. logits: [tokens, STRIDE]; choice, weight: [tokens, CHOSEN]
override EXPERTS: u32;
override STRIDE: u32;
override CHOSEN: u32;
override SIGMOID: u32; // 0: softmax
override HAS_BIAS: u32; // 0: `bias` is not read
override GROUPS: u32; // EXPERTS is a multiple of it
override TOP_GROUPS: u32;
override GROUP_BEST: u32; // 1 or 2
override NORMALIZE: u32;
override SCALE: f32;

const WORKGROUP = 64u;
// Below every score + bias: of groups that are left out, of experts that are chosen already, and before the first.
const LEFT_OUT = -1.0e38;
const TAKEN = -2.0e38;
const NOTHING = -3.0e38;

@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> choice: array<u32>;
@group(0) @binding(4) var<storage, read_write> weight: array<f32>;

var<workgroup> score: array<f32, EXPERTS>;
var<workgroup> rank: array<f32, EXPERTS>; // score + bias
var<workgroup> group_rank: array<f32, GROUPS>;
var<workgroup> lane_value: array<f32, WORKGROUP>;
var<workgroup> lane_expert: array<u32, WORKGROUP>;
var<workgroup> chosen: array<u32, CHOSEN>;
var<workgroup> maximum: f32;
var<workgroup> total: f32;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let token = group.x;
  for (var e = lane; e < EXPERTS; e += WORKGROUP) {
    score[e] = logits[token * STRIDE + e];
  }
  if (SIGMOID == 1u) {
    for (var e = lane; e < EXPERTS; e += WORKGROUP) {
      score[e] = sigmoid(score[e]);
    }
  } else {
    softmax(lane);
  }
  for (var e = lane; e < EXPERTS; e += WORKGROUP) {
    rank[e] = score[e];
    if (HAS_BIAS == 1u) {
      rank[e] += bias[e];
    }
  }
  workgroupBarrier();

  if (TOP_GROUPS < GROUPS) {
    for (var g = lane; g < GROUPS; g += WORKGROUP) {
      group_rank[g] = worth_of(g);
    }
    workgroupBarrier();
    if (lane == 0u) {
      leave_out_groups();
    }
    workgroupBarrier();
  }

  for (var i = 0u; i < CHOSEN; i++) {
    var value = NOTHING;
    var expert = EXPERTS;
    for (var e = lane; e < EXPERTS; e += WORKGROUP) {
      if (rank[e] > value) {
        value = rank[e];
        expert = e;
      }
    }
    lane_value[lane] = value;
    lane_expert[lane] = expert;
    workgroupBarrier();
    if (lane == 0u) {
      take_best(i);
    }
    workgroupBarrier();
  }

  if (lane == 0u) {
    write(token);
  }
}

fn softmax(lane: u32) {
  var largest = NOTHING;
  for (var e = lane; e < EXPERTS; e += WORKGROUP) {
    largest = max(largest, score[e]);
  }
  lane_value[lane] = largest;
  workgroupBarrier();
  if (lane == 0u) {
    maximum = lane_value[0];
    for (var i = 1u; i < WORKGROUP; i++) {
      maximum = max(maximum, lane_value[i]);
    }
  }
  workgroupBarrier();
  var sum = 0.0;
  for (var e = lane; e < EXPERTS; e += WORKGROUP) {
    score[e] = exp(score[e] - maximum);
    sum += score[e];
  }
  lane_value[lane] = sum;
  workgroupBarrier();
  if (lane == 0u) {
    total = 0.0;
    for (var i = 0u; i < WORKGROUP; i++) {
      total += lane_value[i];
    }
  }
  workgroupBarrier();
  for (var e = lane; e < EXPERTS; e += WORKGROUP) {
    score[e] /= total;
  }
}

fn worth_of(group: u32) -> f32 {
  let size = EXPERTS / GROUPS;
  var best = NOTHING;
  var second = NOTHING;
  for (var e = group * size; e < (group + 1u) * size; e++) {
    second = max(second, min(best, rank[e]));
    best = max(best, rank[e]);
  }
  if (GROUP_BEST == 2u) {
    return best + second;
  }
  return best;
}

// A group stays if fewer than TOP_GROUPS are before it.
fn leave_out_groups() {
  for (var g = 0u; g < GROUPS; g++) {
    var before = 0u;
    for (var other = 0u; other < GROUPS; other++) {
      let is_better = group_rank[other] > group_rank[g] || (group_rank[other] == group_rank[g] && other < g);
      before += select(0u, 1u, is_better);
    }
    if (before >= TOP_GROUPS) {
      for (var i = 0u; i < EXPERTS / GROUPS; i++) {
        rank[g * (EXPERTS / GROUPS) + i] = LEFT_OUT;
      }
    }
  }
}

// The best of what the lanes found becomes the i-th choice.
fn take_best(i: u32) {
  var value = NOTHING;
  var expert = EXPERTS;
  for (var other = 0u; other < WORKGROUP; other++) {
    let found = lane_value[other];
    if (found > value || (found == value && lane_expert[other] < expert)) {
      value = found;
      expert = lane_expert[other];
    }
  }
  expert = min(expert, EXPERTS - 1u); // of NaN none is best
  chosen[i] = expert;
  rank[expert] = TAKEN;
}

fn write(token: u32) {
  var sum = 0.0;
  for (var i = 0u; i < CHOSEN; i++) {
    sum += score[chosen[i]];
  }
  for (var i = 0u; i < CHOSEN; i++) {
    var value = score[chosen[i]];
    if (NORMALIZE == 1u) {
      value /= sum + 1e-20;
    }
    choice[token * CHOSEN + i] = chosen[i];
    weight[token * CHOSEN + i] = value * SCALE;
  }
}
