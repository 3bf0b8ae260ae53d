import { type Heading, type FinishedText, type Shape, usageOf } from "./reply-shapes.ts";
import type { TextRequest } from "./text-request.ts";
import type { Texts } from "./texts.ts";

/** A reply with all texts, whole. */
export async function wholeReply({ pieces, usage }: Texts, shape: Shape, heading: Heading): Promise<object> {
  const texts = new Map<number, FinishedText>();
  for await (const { index, text, reports, finish } of pieces) {
    const whole = texts.get(index) ?? { index, text: "", reports: [], finish: "length" };
    texts.set(index, whole);
    whole.text += text;
    whole.reports.push(...reports);
    if (finish !== null) whole.finish = finish;
  }
  const choices = [...texts.values()].toSorted((a, b) => a.index - b.index).map((text) => shape.choice(text));
  return { ...head(heading, shape.whole), choices, usage: usageOf(usage) };
}

/** The same as events, `data` of each. */
export async function* replyEvents(
  { pieces, usage }: Texts,
  { includeUsage }: TextRequest,
  shape: Shape,
  heading: Heading,
): AsyncGenerator<string> {
  const event = (choices: object[], more: object = includeUsage ? { usage: null } : {}) =>
    JSON.stringify({ ...head(heading, shape.chunk), choices, ...more });
  const begun = new Set<number>();
  for await (const piece of pieces) {
    const opening = begun.has(piece.index) ? undefined : shape.opening(piece.index);
    begun.add(piece.index);
    if (opening) yield event([opening]);
    for (const choice of shape.pieces(piece)) yield event([choice]);
  }
  if (includeUsage) yield event([], { usage: usageOf(usage) });
}

const head = ({ id, created, model, system_fingerprint }: Heading, object: string) => ({
  id,
  object,
  created,
  model,
  system_fingerprint,
});
