// 1 / (1 + exp(-x)), never by exp of a large positive number, which would overflow.
fn sigmoid(value: f32) -> f32 {
  let e = exp(-abs(value));
  return select(e, 1.0, value >= 0.0) / (1.0 + e);
}
