// y[row, OUT_AT + first_output + n] = LLM.int8() of Σ_k codes[row, k] * weight[n, k], both in codes of 8 bits, for a few rows
//
// A workgroup makes OUTPUTS neighbouring outputs of one row; each of the 32 lanes of an output takes every 32nd load of eight
// columns. Sums of integers are exact in any order, up to 133 144 columns.
override OUTPUTS: u32;

const LANES = 32u;

var<workgroup> partial: array<i32, LANES * OUTPUTS>;

@compute @workgroup_size(LANES * OUTPUTS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let row = group.y;
  let output = group.x * OUTPUTS + local / LANES;
  let columns8 = WEIGHT_STRIDE / 8u;

  find_outliers(local, LANES * OUTPUTS);
  var sum = 0;
  if (output < params.outputs) {
    for (var k8 = local % LANES; k8 < columns8; k8 += LANES) {
      let a = codes[row * columns8 + k8];
      let b = weight[output * columns8 + k8];
      sum += dot4(a.x, b.x) + dot4(a.y, b.y);
    }
  }
  partial[local] = sum;
  workgroupBarrier();

  if (local < OUTPUTS) {
    var total = 0;
    for (var lane = 0u; lane < LANES; lane++) {
      total += partial[local * LANES + lane];
    }
    store(row, group.x * OUTPUTS + local, total);
  }
}
