// As block_lanes8, without subgroups: each lane loads every column itself.
struct Lane {
  @builtin(local_invocation_index) index: u32,
}

struct Block {
  at: u32,
}

fn load_block(row: u32, column8: u32, lane: Lane) -> Block {
  return Block(row + column8 * 2u);
}

fn first8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(x[block.at], x[block.at + 1u]);
}

fn second8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(x[block.at + 2u], x[block.at + 3u]);
}

fn third8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(x[block.at + 4u], x[block.at + 5u]);
}

fn fourth8(block: Block) -> mat2x4<f32> {
  return mat2x4<f32>(x[block.at + 6u], x[block.at + 7u]);
}
