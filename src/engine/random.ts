/**
 * The random numbers of sampling: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
 * 1, 2, 3", 2011), keyed by the seed and counting positions. There is no state: the number for a position does not
 * depend on what was drawn before, beside it, or on which node. docs/sampling.md says it for others to repeat.
 */

/** What the third word of the counter keeps apart. */
const PURPOSE = { token: 0, choice: 1 } as const;

/**
 * For the token at absolute `position` (0 is the sequence's first): a whole number from 0 to 2^53 - 1, uniform.
 * `seed`: a safe integer, negative ones too.
 */
export function drawAt(seed: number, position: number): number {
  return firstBits(seed, position, PURPOSE.token);
}

/** The seed of the choice with this index, where one call asks for several (`n`): 0 has the call's own. */
export function seedOfChoice(seed: number, index: number): number {
  return index === 0 ? seed : firstBits(seed, index, PURPOSE.choice);
}

/** A seed for who gave none, from the system's randomness. */
export function randomSeed(): number {
  const [low = 0, high = 0] = crypto.getRandomValues(new Uint32Array(2));
  return to53(low, high);
}

function firstBits(seed: number, count: number, purpose: number): number {
  const key = wordsOf(seed);
  const [x = 0, y = 0] = philox([...wordsOf(count), purpose, 0], key);
  return to53(x, y);
}

const to53 = (x: number, y: number): number => (x >>> 5) * 2 ** 26 + (y >>> 6);

/** The two's complement of 64 bits, low word first. */
function wordsOf(value: number): [number, number] {
  return [(value % 2 ** 32) >>> 0, Math.floor(value / 2 ** 32) >>> 0];
}

/** One block: `counter` [4] and `key` [2] are unsigned words of 32 bits; the result has four. */
export function philox(counter: readonly number[], key: readonly number[]): number[] {
  let [c0 = 0, c1 = 0, c2 = 0, c3 = 0] = counter;
  let [k0 = 0, k1 = 0] = key;
  for (let round = 0; round < 10; round++) {
    const [high0, low0] = multiply(0xd2511f53, c0);
    const [high1, low1] = multiply(0xcd9e8d57, c2);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  return [c0, c1, c2, c3];
}

/** The 64 bits of a · b, as two words. */
function multiply(a: number, b: number): [high: number, low: number] {
  const low = (a & 0xffff) * b; // below 2^48: exact
  const high = (a >>> 16) * b + Math.floor(low / 2 ** 16);
  return [Math.floor(high / 2 ** 16), Math.imul(a, b) >>> 0];
}
