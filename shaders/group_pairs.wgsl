// order = the pairs of a token and a chosen expert, expert by expert; tiles = the same in tiles of up to TILE of one expert
//
// Pair p is token p / chosen's choice p % chosen. One workgroup; a lane takes every WORKGROUP-th expert through all pairs.
// Pairs of one expert keep their order. Tiles behind the last have a count of 0.
// choice, order: [pairs]; tiles: [params.tiles, 4]: expert, first in order, count, 0
override EXPERTS: u32;

const TILE = 32u;
const WORKGROUP = 128u;

struct Params {
  pairs: u32,
  tiles: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> choice: array<u32>;
@group(0) @binding(2) var<storage, read_write> order: array<u32>;
@group(0) @binding(3) var<storage, read_write> tiles: array<vec4<u32>>;

var<workgroup> count: array<u32, EXPERTS>;
var<workgroup> first: array<u32, EXPERTS>;
var<workgroup> first_tile: array<u32, EXPERTS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) lane: u32) {
  for (var e = lane; e < EXPERTS; e += WORKGROUP) {
    var pairs = 0u;
    for (var p = 0u; p < params.pairs; p++) {
      pairs += select(0u, 1u, choice[p] == e);
    }
    count[e] = pairs;
  }
  workgroupBarrier();

  if (lane == 0u) {
    var pairs = 0u;
    var used = 0u;
    for (var e = 0u; e < EXPERTS; e++) {
      first[e] = pairs;
      first_tile[e] = used;
      pairs += count[e];
      used += (count[e] + TILE - 1u) / TILE;
    }
    for (var tile = used; tile < params.tiles; tile++) {
      tiles[tile] = vec4<u32>();
    }
  }
  workgroupBarrier();

  for (var e = lane; e < EXPERTS; e += WORKGROUP) {
    var at = first[e];
    if (count[e] > 0u) {
      for (var p = 0u; p < params.pairs; p++) {
        if (choice[p] == e) {
          order[at] = p;
          at++;
        }
      }
    }
    for (var done = 0u; done < count[e]; done += TILE) {
      tiles[first_tile[e] + done / TILE] = vec4<u32>(e, first[e] + done, min(TILE, count[e] - done), 0u);
    }
  }
}
