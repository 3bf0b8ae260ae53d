// The keys of a sequence are taken in chunks of KEYS at absolute positions. A chunk gives its own maximum, sum and
// weighted values, and chunks are merged from first to last. So a query's numbers depend neither on the other queries
// nor on which kernel makes them.
const KEYS = 32u;
// Below every score that a model can make; not -inf, which a compiler may assume away.
const LOWEST = -1.0e38;

// A run of neighbouring queries of one sequence. The sequence's position p lies at cache slot first_slot + p.
struct Queries {
  first_token: u32,
  count: u32,
  first_position: u32,
  first_slot: u32,
}
