// A soft cap: cap · tanh(x / cap), in our own words, for the built-in tanh may be off by 1e-5.

fn soft_cap(value: f32, cap: f32) -> f32 {
  let z = value / cap;
  let a = min(abs(z), 20.0); // from about 9 on the result is 1 in float32
  // Near zero 1 - e would lose digits; there the series up to a⁹ is exact to half a unit in the last place.
  let e = exp(-2.0 * a);
  let q = a * a;
  var p = 0.02186948853615520;
  p = fma(p, q, -0.05396825396825397);
  p = fma(p, q, 0.13333333333333333);
  p = fma(p, q, -0.33333333333333333);
  let near = fma(a * q, p, a);
  let far = (1.0 - e) / (1.0 + e);
  let tanh = select(far, near, a < 0.2);
  return select(tanh, -tanh, z < 0.0) * cap;
}
