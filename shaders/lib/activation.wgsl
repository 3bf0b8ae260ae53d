// The activation functions: ACTIVATION selects one of them when the pipeline is built.
override ACTIVATION: u32;

fn activate(value: f32) -> f32 {
  switch ACTIVATION {
    case 0u: { return gelu_tanh(value); }
    case 1u: { return gelu_erf(value); }
    case 2u: { return value * sigmoid(1.702 * bounded(value)); }
    case 3u: { return value * sigmoid(value); }
    default: { return select(value, 0.0, value < 0.0); } // max could lose a NaN
  }
}

// x/2 (1 + tanh(z)) with z = sqrt(2/π) (x + 0.044715 x³) is x sigmoid(2z): the built-in tanh may be off by 1e-5.
fn gelu_tanh(value: f32) -> f32 {
  let v = bounded(value);
  let z = 0.7978845608028654 * fma(0.044715 * v * v, v, v);
  return value * sigmoid(2.0 * z);
}

// Beyond ±128 every tail here is zero in float32; unbounded, a cube or a square would overflow, and a compiler may assume
// that nothing does.
fn bounded(value: f32) -> f32 {
  return clamp(value, -128.0, 128.0);
}

// x/2 (1 + erf(x/√2)). WGSL has no erf.
fn gelu_erf(value: f32) -> f32 {
  return 0.5 * value * erfc_negative(bounded(value));
}

// 1 + erf(x/√2) = erfc(-x/√2), by the rational Chebyshev fit of W. Press et al. (Numerical Recipes, erfcc),
// whose relative error is below 1.2e-7 everywhere: the negative tail of gelu keeps its digits.
fn erfc_negative(value: f32) -> f32 {
  let z = abs(value) * 0.7071067811865476;
  let t = 1.0 / (1.0 + 0.5 * z);
  var p = 0.17087277;
  p = fma(p, t, -0.82215223);
  p = fma(p, t, 1.48851587);
  p = fma(p, t, -1.13520398);
  p = fma(p, t, 0.27886807);
  p = fma(p, t, -0.18628806);
  p = fma(p, t, 0.09678418);
  p = fma(p, t, 0.37409196);
  p = fma(p, t, 1.00002368);
  p = fma(p, t, -1.26551223);
  let tail = t * exp(p - z * z);
  return select(tail, 2.0 - tail, value >= 0.0);
}
