// y[t, h, c] = Σ_d q[t, h, d] weight8(key row d of head h, c): a query as it meets compressed keys; behind it its turned part
//
// A key is a product of a matrix with the token's latent, so q · key is (q · matrix) · latent, and the keys themselves need
// not be made. A lane makes eight columns of TOKENS tokens, adding row after row of the matrix, from first to last.
// weight: per head PLAIN rows for its keys and VALUE rows for its values, of LATENT columns, the heads from
// params.first_head on. q: [tokens, STRIDE], per head PLAIN dimensions and TURNED ones behind them.
// y: [tokens, STRIDE_OUT], per head LATENT + TURNED
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
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let head = params.first_head + group.y;
  let first = group.z * TOKENS;
  let column8 = group.x * WORKGROUP + lane;
  let tokens = min(TOKENS, params.rows - first);

  if (group.x == 0u) {
    for (var i = lane; i < tokens * TURNED; i += WORKGROUP) {
      let token = first + i / TURNED;
      let turned_at = token * STRIDE + head * (PLAIN + TURNED) + PLAIN;
      y[token * STRIDE_OUT + head * (LATENT + TURNED) + LATENT + i % TURNED] = q[turned_at + i % TURNED];
    }
  }
  if (column8 * 8u >= LATENT) {
    return;
  }

  var sums = array<mat2x4<f32>, TOKENS>();
  for (var d = 0u; d < PLAIN; d++) {
    let w = weight8(group.y * (PLAIN + VALUE) + d, column8);
    for (var t = 0u; t < TOKENS; t++) {
      let value = vec4<f32>(q[min(first + t, params.rows - 1u) * STRIDE + head * (PLAIN + TURNED) + d]);
      sums[t] = mat2x4<f32>(fma(value, w[0], sums[t][0]), fma(value, w[1], sums[t][1]));
    }
  }
  for (var t = 0u; t < tokens; t++) {
    let at = (first + t) * STRIDE_OUT + head * (LATENT + TURNED) + column8 * 8u;
    for (var i = 0u; i < min(8u, LATENT - column8 * 8u); i++) {
      y[at + i] = sums[t][i / 4u][i % 4u];
    }
  }
}
