// y[t, h, n] = Σ_c weight8(value row n of head h, c) x[t, h, c]: what a head has gathered of latents, made its values
//
// A lane makes one output of TOKENS tokens, column after column. weight: per head PLAIN rows for its keys and VALUE rows for
// its values, of LATENT columns, the heads from params.first_head on.
// x: [tokens, STRIDE], per head LATENT columns that count and TURNED that do not; y: [tokens, STRIDE_OUT], per head VALUE
override PLAIN: u32;
override TURNED: u32;
override VALUE: u32;
override LATENT: u32;
override STRIDE: u32;
override STRIDE_OUT: u32;

const SCALES = 4; // where an encoding that has scales binds them
const WORKGROUP = 64u;
const TOKENS = 4u;

struct Params {
  rows: u32,
  first_head: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let head = params.first_head + group.y;
  let first = group.z * TOKENS;
  let output = group.x * WORKGROUP + lane;
  if (output >= VALUE) {
    return;
  }

  var sums = vec4<f32>();
  for (var c8 = 0u; c8 * 8u < LATENT; c8++) {
    let w = weight8(group.y * (PLAIN + VALUE) + PLAIN + output, c8);
    for (var i = 0u; i < min(8u, LATENT - c8 * 8u); i++) {
      let c = c8 * 8u + i;
      sums = fma(vec4<f32>(at(first, head, c), at(first + 1u, head, c), at(first + 2u, head, c), at(first + 3u, head, c)),
        vec4<f32>(w[i / 4u][i % 4u]), sums);
    }
  }
  for (var t = 0u; t < min(TOKENS, params.rows - first); t++) {
    y[(first + t) * STRIDE_OUT + head * VALUE + output] = sums[t];
  }
}

// Of a token behind the last: the last one's.
fn at(token: u32, head: u32, column: u32) -> f32 {
  return x[min(token, params.rows - 1u) * STRIDE + head * (LATENT + TURNED) + column];
}
