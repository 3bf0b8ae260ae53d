// The code book of NF4 (bitsandbytes, functional.py): the value of the lowest four bits.
// As a tree of choices: a table that each lane reads elsewhere is slower (lavapipe: by an eighth of a gemv).
fn code_value(code: u32) -> f32 {
  let first = (code & 1u) != 0u;
  let second = (code & 2u) != 0u;
  let third = (code & 4u) != 0u;
  let low = select(
    select(select(-1.0, -0.6961928009986877, first), select(-0.5250730514526367, -0.39491748809814453, first), second),
    select(select(-0.28444138169288635, -0.18477343022823334, first), select(-0.09105003625154495, 0.0, first), second),
    third,
  );
  let high = select(
    select(select(0.07958029955625534, 0.16093020141124725, first), select(0.24611230194568634, 0.33791524171829224, first), second),
    select(select(0.44070982933044434, 0.5626170039176941, first), select(0.7229568362236023, 1.0, first), second),
    third,
  );
  return select(low, high, (code & 8u) != 0u);
}
