import { expect, test } from "bun:test";
import { sum } from "../../src/base/bytes.ts";
import type { ForwardRequest } from "../../src/protocol/message.ts";
import { rectangleOf } from "../../src/protocol/rectangle.ts";
import { decodeReply, encodeReply, type ForwardResult, replyBytes } from "../../src/protocol/reply.ts";
import { SEEDS, seeded } from "./seeded.ts";

const widths = { hiddenSize: 3, vocabSize: 5 };

test.each(SEEDS)("what a node answers to a frame is what the node before it reads (seed %d)", (seed) => {
  const random = seeded(seed);
  const rows = Array.from({ length: 1 + random(4) }, () => ({ tokens: 1 + random(4), positionStart: 0 }));
  const tokens = sum(rows.map((row) => row.tokens));
  const values = (length: number) => Uint16Array.from({ length }, () => random(65536));
  const results: ForwardResult[] = [
    { kind: "none" },
    { kind: "token", ids: rows.map(() => random(5)), finish: rows.map(() => (random(2) ? "stop" : null)) },
    { kind: "hidden", values: values(tokens * 3) },
    { kind: "logits", values: values(rows.length * 5) },
    { kind: "all_logits", values: values(tokens * 5) },
  ];
  for (const result of results) {
    const want = result.kind;
    const reply = encodeReply(requestOf({ rows, want, spelling: "container" }), result, widths);
    const body =
      typeof reply.body === "string" ? new TextEncoder().encode(reply.body) : (reply.body ?? new Uint8Array());
    const contentType = reply.headers["Content-Type"] ?? "";
    expect(decodeReply({ status: reply.status, contentType, body }, { rows, want, ...widths })).toEqual(result);
  }
});

test.each(SEEDS)("a reply has as many bytes as were promised before it was computed (seed %d)", (seed) => {
  const random = seeded(seed);
  const lengths = Array.from({ length: 1 + random(4) }, () => random(4));
  lengths.push(1);
  const rows = lengths.filter((tokens) => tokens > 0).map((tokens) => ({ tokens, positionStart: 0 }));
  const tokens = sum(lengths);
  for (const [kind, length] of [
    ["hidden", tokens * 3],
    ["logits", rows.length * 5],
    ["all_logits", tokens * 5],
  ] as const) {
    const request = requestOf({ rows, want: kind, spelling: "raw", rectangle: rectangleOf(lengths) });
    const reply = encodeReply(request, { kind, values: new Uint16Array(length) }, widths);
    expect((reply.body as Uint8Array).length).toBe(replyBytes(request, kind, widths));
  }
});

function requestOf(
  given: Pick<ForwardRequest, "rows" | "want" | "spelling"> & Partial<ForwardRequest>,
): ForwardRequest {
  const payload = { kind: "hidden", hiddenSize: 3, values: new Uint16Array(0) } as const;
  return { payload, rectangle: undefined, ...given };
}
