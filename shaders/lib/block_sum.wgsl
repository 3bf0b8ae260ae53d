// The sum of one block of 32 columns of x, each times its weight in row `weight_row`, from first to last. The block begins
// at column 8 * k8.
fn block_sum(block: Block, weight_row: u32, k8: u32) -> f32 {
  let run = weight_run(weight_row, k8 / 4u);
  var sum = add8(first8(block), run8(run, weight_row, k8), 0.0);
  if (has(k8 + 1u)) {
    sum = add8(second8(block), run8(run, weight_row, k8 + 1u), sum);
  }
  if (has(k8 + 2u)) {
    sum = add8(third8(block), run8(run, weight_row, k8 + 2u), sum);
  }
  if (has(k8 + 3u)) {
    sum = add8(fourth8(block), run8(run, weight_row, k8 + 3u), sum);
  }
  return sum;
}

// Whether a row has the columns from 8 * k8 on. Known when the pipeline is built, unless the last block is a part of one.
fn has(k8: u32) -> bool {
  return WEIGHT_STRIDE % 32u == 0u || k8 < WEIGHT_STRIDE / 8u;
}

// Eight columns, one after another.
fn add8(x: mat2x4<f32>, w: mat2x4<f32>, before: f32) -> f32 {
  var sum = fma(x[0].x, w[0].x, before);
  sum = fma(x[0].y, w[0].y, sum);
  sum = fma(x[0].z, w[0].z, sum);
  sum = fma(x[0].w, w[0].w, sum);
  sum = fma(x[1].x, w[1].x, sum);
  sum = fma(x[1].y, w[1].y, sum);
  sum = fma(x[1].z, w[1].z, sum);
  return fma(x[1].w, w[1].w, sum);
}
