enable subgroups;

// As block_lanes8, for subgroups of four lanes or more: eight columns to a lane, in two loads.
struct Lane {
  @builtin(local_invocation_index) index: u32,
  @builtin(subgroup_invocation_id) of_subgroup: u32,
}

struct Block {
  mine: vec4<f32>, // of the first 16 columns
  mine_of_rest: vec4<f32>,
}

// The block from column 8 * column8 on of the row that begins at `row`. What lies behind its end is any of its numbers.
fn load_block(row: u32, column8: u32, lane: Lane) -> Block {
  let at = column8 * 2u + lane.of_subgroup % 4u;
  if (WEIGHT_STRIDE % 32u == 0u) {
    return Block(x[row + at], x[row + at + 4u]);
  }
  let last = WEIGHT_STRIDE / 4u - 1u;
  return Block(x[row + min(at, last)], x[row + min(at + 4u, last)]);
}

// Its columns, eight by eight. All lanes of a workgroup must come here together.
fn first8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine, 0u), subgroupBroadcast(block.mine, 1u));
}

fn second8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine, 2u), subgroupBroadcast(block.mine, 3u));
}

fn third8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine_of_rest, 0u), subgroupBroadcast(block.mine_of_rest, 1u));
}

fn fourth8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine_of_rest, 2u), subgroupBroadcast(block.mine_of_rest, 3u));
}
