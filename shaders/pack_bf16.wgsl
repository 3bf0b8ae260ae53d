// y[rows, columns] packed bfloat16 without padding = x[row, column]: how activations leave the device
// x: [rows, STRIDE]; y: two values to a word. One invocation makes one word, which may span two rows
override COLUMNS: u32;
override STRIDE: u32;
override WORKGROUP: u32;

struct Params {
  count: u32, // rows * COLUMNS
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let word = id.y * groups.x * WORKGROUP + id.x;
  let element = word * 2u;
  if (element >= params.count) {
    return;
  }
  y[word] = pack_bf16(value_at(element), select(0.0, value_at(element + 1u), element + 1u < params.count));
}

fn value_at(element: u32) -> f32 {
  return x[(element / COLUMNS) * STRIDE + element % COLUMNS];
}
