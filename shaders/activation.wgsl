// x = activation(x), each value on its own
// x: [rows, STRIDE]; ACTIVATION selects one of the functions below when the pipeline is built
override STRIDE: u32;
override ACTIVATION: u32;
override WORKGROUP: u32;

@group(0) @binding(1) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= STRIDE) {
    return;
  }
  let i = id.y * STRIDE + id.x;
  switch ACTIVATION {
    case 0u: { x[i] = gelu_tanh(x[i]); }
    case 1u: { x[i] = gelu_erf(x[i]); }
    case 2u: { x[i] = x[i] * sigmoid(1.702 * bounded(x[i])); }
    case 3u: { x[i] = x[i] * sigmoid(x[i]); }
    default: { x[i] = select(x[i], 0.0, x[i] < 0.0); } // max could lose a NaN
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

// Never exp of a large positive number, which would overflow.
fn sigmoid(value: f32) -> f32 {
  let e = exp(-abs(value));
  return select(e, 1.0, value >= 0.0) / (1.0 + e);
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
