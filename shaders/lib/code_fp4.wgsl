// The code book of FP4 (bitsandbytes, functional.py): the value of the lowest four bits, of which the highest is the sign.
// As a tree of choices, like that of NF4.
fn code_value(code: u32) -> f32 {
  let first = (code & 1u) != 0u;
  let second = (code & 2u) != 0u;
  let magnitude = select(
    select(select(0.0, 0.0052083334885537624, first), select(0.6666666865348816, 1.0, first), second),
    select(select(0.3333333432674408, 0.5, first), select(0.1666666716337204, 0.25, first), second),
    (code & 4u) != 0u,
  );
  return select(magnitude, -magnitude, (code & 8u) != 0u);
}
