// y[row, :] = (x[row, :] - mean) / sqrt(variance + EPS) * weight + bias, with the biased variance
// One workgroup per row. x, y: [rows, COLUMNS]; weight, bias: [COLUMNS]
override COLUMNS: u32;
override STRIDE: u32;
override EPS: f32;

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
  let row = group.x * STRIDE;

  var sum = 0.0;
  for (var i = lane.index; i < COLUMNS; i += WORKGROUP) {
    sum += x[row + i];
  }
  let mean = workgroup_sum(sum, lane) / f32(COLUMNS);

  // A second pass over the row, for E[x²] - E[x]² loses all digits where the mean is large.
  var squares = 0.0;
  for (var i = lane.index; i < COLUMNS; i += WORKGROUP) {
    let centred = x[row + i] - mean;
    squares = fma(centred, centred, squares);
  }
  let scale = 1.0 / sqrt(workgroup_sum(squares, lane) / f32(COLUMNS) + EPS);

  for (var i = lane.index; i < COLUMNS; i += WORKGROUP) {
    y[row + i] = fma((x[row + i] - mean) * scale, weight[i], bias[i]);
  }
}
