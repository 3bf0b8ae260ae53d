/** Deeper than anything that is meant, and the depth at which serde_json stops as well. */
const MOST_DEPTH = 128;

/**
 * `JSON.parse` for text from outside. What is nested more deeply is refused before anything is made of it: whatever goes through
 * such a value afterwards (a template, `JSON.stringify`) would run out of stack, and take seconds to do so.
 *
 * Throws SyntaxError, or RangeError for that.
 */
export function parseJson(text: string): unknown {
  if (depthOf(text) > MOST_DEPTH) throw new RangeError(`the JSON is nested more than ${MOST_DEPTH} deep`);
  return JSON.parse(text);
}

/** Of lists and objects in each other. */
function depthOf(text: string): number {
  let [depth, most] = [0, 0];
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at);
    if (code === QUOTE) {
      at = endOfString(text, at);
    } else if (code === OPEN_BRACKET || code === OPEN_BRACE) {
      most = Math.max(most, ++depth);
    } else if (code === CLOSE_BRACKET || code === CLOSE_BRACE) {
      depth--;
    }
  }
  return most;
}

/** Where the string ends that begins at `at`. */
function endOfString(text: string, at: number): number {
  for (;;) {
    at = text.indexOf('"', at + 1);
    if (at < 0) return text.length;
    let backslashes = 0;
    while (text.charCodeAt(at - 1 - backslashes) === BACKSLASH) backslashes++;
    if (backslashes % 2 === 0) return at;
  }
}

const QUOTE = 0x22;
const BACKSLASH = 0x5c;
const OPEN_BRACKET = 0x5b;
const CLOSE_BRACKET = 0x5d;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;
