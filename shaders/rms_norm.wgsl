// y[row, :] = x[row, :] / sqrt(mean of x² + EPS) * (weight + OFFSET)
// One workgroup per row. x, y: [rows, COLUMNS]; weight: [COLUMNS]
override COLUMNS: u32;
override STRIDE: u32;
override EPS: f32;
override OFFSET: f32; // 1 where the checkpoint keeps weight - 1

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
  let row = group.x * STRIDE;

  var squares = 0.0;
  for (var i = lane.index; i < COLUMNS; i += WORKGROUP) {
    squares = fma(x[row + i], x[row + i], squares);
  }
  let scale = 1.0 / sqrt(workgroup_sum(squares, lane) / f32(COLUMNS) + EPS);

  for (var i = lane.index; i < COLUMNS; i += WORKGROUP) {
    y[row + i] = x[row + i] * scale * (weight[i] + OFFSET);
  }
}
