// y[t, head] = the chunks that attention_decode made, merged from first to last
//
// One workgroup per (query, head); a lane takes one or more dimensions. partial: as attention_decode writes it
override HEAD_DIM: u32;
override HEADS: u32;
override STRIDE_OUT: u32;

const WORKGROUP = 64u;

struct Params {
  chunks: u32, // of the longest sequence
  first_run: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> queries: array<Queries>;
@group(0) @binding(2) var<storage, read> partial: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let run = queries[params.first_run + group.x];
  let head = group.y;
  let chunks = run.first_position / KEYS + 1u;
  let first = (group.x * HEADS + head) * params.chunks * (HEAD_DIM + 2u);

  for (var dim = lane; dim < HEAD_DIM; dim += WORKGROUP) {
    var maximum = LOWEST;
    var total = 0.0;
    var output = 0.0;
    for (var chunk = first_visible(run.first_position) / KEYS; chunk < chunks; chunk++) {
      let at = first + chunk * (HEAD_DIM + 2u);
      let merged = max(maximum, partial[at]);
      let keep = exp(maximum - merged);
      let gain = exp(partial[at] - merged);
      total = fma(partial[at + 1u], gain, total * keep);
      output = fma(partial[at + 2u + dim], gain, output * keep);
      maximum = merged;
    }
    y[run.first_token * STRIDE_OUT + head * HEAD_DIM + dim] = output / total;
  }
}
