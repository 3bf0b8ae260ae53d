enable subgroups;

// A block of 32 columns of a row of x, loaded by eight lanes together, four columns each, and then given to all lanes. For
// subgroups of eight lanes or more. The kernel declares x: array<vec4<f32>>, in rows of WEIGHT_STRIDE columns.
struct Lane {
  @builtin(local_invocation_index) index: u32,
  @builtin(subgroup_invocation_id) of_subgroup: u32,
}

struct Block {
  mine: vec4<f32>,
}

// The block from column 8 * column8 on of the row that begins at `row`. What lies behind its end is any of its numbers.
fn load_block(row: u32, column8: u32, lane: Lane) -> Block {
  let at = column8 * 2u + lane.of_subgroup % 8u;
  if (WEIGHT_STRIDE % 32u == 0u) {
    return Block(x[row + at]);
  }
  return Block(x[row + min(at, WEIGHT_STRIDE / 4u - 1u)]);
}

// Its columns, eight by eight. All lanes of a workgroup must come here together.
fn first8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine, 0u), subgroupBroadcast(block.mine, 1u));
}

fn second8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine, 2u), subgroupBroadcast(block.mine, 3u));
}

fn third8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine, 4u), subgroupBroadcast(block.mine, 5u));
}

fn fourth8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(subgroupBroadcast(block.mine, 6u), subgroupBroadcast(block.mine, 7u));
}
