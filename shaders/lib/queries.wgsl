// The keys of a sequence are taken in chunks of KEYS at absolute positions. A chunk gives its own maximum, sum and
// weighted values, and chunks are merged from first to last. So a query's numbers depend neither on the other queries
// nor on which kernel makes them.
const KEYS = 32u;
// Keys that a query sees, its own position's included; 0: all before it.
override WINDOW: u32;
// Below every score that a model can make; not -inf, which a compiler may assume away.
const LOWEST = -1.0e38;

// A run of neighbouring queries of one sequence, whose cache pages are entered in `pages` from first_page on.
struct Queries {
  first_token: u32,
  count: u32,
  first_position: u32,
  first_page: u32,
}

// The first key that a query at this position sees.
fn first_visible(position: u32) -> u32 {
  return select(0u, position + 1u - WINDOW, WINDOW > 0u && position + 1u > WINDOW);
}
