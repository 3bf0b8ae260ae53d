/** Characters of a quoted value, at most; and how deep it is shown. */
const MOST_CHARACTERS = 80;
const MOST_DEPTH = 4;

/**
 * A value that came from outside, for a message about it: as JSON, cut where it is long or deep. Never throws, whatever `value`
 * holds, and takes no longer for a large one than for a small one. NaN and the infinities, for which JSON has no word, are
 * written as JavaScript has them; a whole number that a float64 has rounded is only told roughly.
 */
export function quote(value: unknown, most = MOST_CHARACTERS): string {
  if (value === undefined) return "missing";
  return cut(written(value, most, 0), most);
}

/** A text that came from outside, without quotation marks: cut where it is long. */
export const cut = (text: string, most = MOST_CHARACTERS): string =>
  text.length > most ? `${text.slice(0, most)}…` : text;

/** `most`: characters that are looked at of what it gives; it may give more. */
function written(value: unknown, most: number, depth: number): string {
  if (typeof value === "string") return JSON.stringify(value.slice(0, most + 1));
  if (typeof value === "number") return numberOf(value);
  if (typeof value !== "object" || value === null) return String(value);
  const isList = Array.isArray(value);
  if (depth === MOST_DEPTH) return isList ? "[…]" : "{…}";
  let inside = "";
  const add = (key: string, item: unknown): boolean => {
    inside += `${inside === "" ? "" : ","}${key}${written(item, most, depth + 1)}`;
    return inside.length <= most;
  };
  if (isList) {
    for (const item of value) if (!add("", item)) break;
  } else {
    for (const key in value) {
      if (!add(`${written(key, most, depth)}:`, (value as Record<string, unknown>)[key])) break;
    }
  }
  return isList ? `[${inside}]` : `{${inside}}`;
}

function numberOf(value: number): string {
  const isRounded = Number.isInteger(value) && !Number.isSafeInteger(value);
  return isRounded ? `about ${value.toPrecision(4)}` : String(value);
}
