// y[row, column] = x[rows, columns] packed bfloat16 without padding: how activations enter the device
// x: two values to a word; y: [rows, STRIDE]
override COLUMNS: u32;
override STRIDE: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= COLUMNS) {
    return;
  }
  let element = id.y * COLUMNS + id.x;
  let word = x[element / 2u];
  y[id.y * STRIDE + id.x] = select(unpack_low(word), unpack_high(word), element % 2u == 1u);
}
