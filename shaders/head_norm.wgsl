// x[t, head] = x[t, head] / sqrt(mean of its squares + EPS) * (weight + OFFSET), for some neighbouring heads of each token
// One workgroup per (token, head). x: [tokens, STRIDE], in place; weight: [HEAD_DIM], the same for every head
override HEAD_DIM: u32;
override HEAD_STRIDE: u32; // from one head to the next
override FIRST: u32; // column of the first head
override STRIDE: u32;
override EPS: f32;
override OFFSET: f32; // 1 where the checkpoint keeps weight - 1

@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, lane: Lane) {
  let head = group.x * STRIDE + FIRST + group.y * HEAD_STRIDE;

  var squares = 0.0;
  for (var i = lane.index; i < HEAD_DIM; i += WORKGROUP) {
    squares = fma(x[head + i], x[head + i], squares);
  }
  let scale = 1.0 / sqrt(workgroup_sum(squares, lane) / f32(HEAD_DIM) + EPS);

  for (var i = lane.index; i < HEAD_DIM; i += WORKGROUP) {
    x[head + i] = x[head + i] * scale * (weight[i] + OFFSET);
  }
}
