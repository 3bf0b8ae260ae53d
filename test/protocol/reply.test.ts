import { expect, test } from "bun:test";
import { decodeContainer } from "../../src/protocol/container.ts";
import type { ErrorBody } from "../../src/protocol/error-reply.ts";
import type { ForwardRequest, ForwardRow } from "../../src/protocol/message.ts";
import { rectangleOf } from "../../src/protocol/rectangle.ts";
import { decodeReply, encodeReply, replyBytes, type RowOutcome } from "../../src/protocol/reply.ts";
import type { Want } from "../../src/protocol/rows.ts";
import { SEEDS, seeded } from "./seeded.ts";

const widths = { hiddenSize: 3, vocabSize: 5 };
const error: ErrorBody = { code: "session_lost", message: "m", hint: "h", node: "n", layers: "2-4", cache_len: 3 };

type Random = ReturnType<typeof seeded>;
const values = (random: Random, length: number) => Uint16Array.from({ length }, () => random(65536));

function outcomeOf(random: Random, want: Want, { tokens }: ForwardRow): RowOutcome {
  switch (want) {
    case "none":
      return { kind: "none" };
    case "token": {
      const top = Array.from({ length: random(3) }, () => ({ id: random(5), logprob: (random(9) - 9) / 7 }));
      const logprobs = random(2) ? { logprobs: { logprob: (random(99) - 99) / 13, top } } : {};
      return { kind: "token", id: random(5), finish: random(2) ? "stop" : null, ...logprobs };
    }
    case "hidden":
      return { kind: "hidden", values: values(random, tokens * 3) };
    case "logits":
      return { kind: "logits", values: values(random, 5) };
    case "all_logits":
      return { kind: "all_logits", values: values(random, tokens * 5) };
  }
}

test.each(SEEDS)("what a node answers to a frame is what the node before it reads, row by row (seed %d)", (seed) => {
  const random = seeded(seed);
  for (const wants of [["none"], ["token"], ["token", "none"], ["hidden"], ["logits"], ["all_logits"]] as Want[][]) {
    const rows = Array.from({ length: 1 + random(4) }, (_, index) => {
      return { index, tokens: 1 + random(4), positionStart: 0, want: wants[random(wants.length)]! };
    });
    const fails = random(2) === 0; // one row at least goes well: else there is no such reply
    const good = random(rows.length);
    const outcomes = rows.map((row, i): RowOutcome => {
      const isError = fails && i !== good && random(2) === 0;
      return isError ? { kind: "error", error: { ...error, row: i } } : outcomeOf(random, row.want, row);
    });
    const reply = encodeReply(requestOf({ rows, want: wants[0]!, spelling: "container" }), outcomes, widths);
    const body =
      typeof reply.body === "string" ? new TextEncoder().encode(reply.body) : (reply.body ?? new Uint8Array());
    const contentType = reply.headers["Content-Type"] ?? "";
    expect(decodeReply({ status: reply.status, contentType, body }, { rows, ...widths })).toEqual(outcomes);
  }
});

test.each(SEEDS)("a reply has as many bytes as were promised before it was computed (seed %d)", (seed) => {
  const random = seeded(seed);
  const lengths = Array.from({ length: 1 + random(4) }, () => random(4));
  lengths.push(1);
  for (const want of ["hidden", "logits", "all_logits"] as const) {
    const rows = lengths.flatMap((tokens, index) => (tokens > 0 ? [{ index, tokens, positionStart: 0, want }] : []));
    const request = requestOf({ rows, want, spelling: "raw", rectangle: rectangleOf(lengths) });
    const reply = encodeReply(
      request,
      rows.map((row) => outcomeOf(random, want, row)),
      widths,
    );
    expect((reply.body as Uint8Array).length).toBe(replyBytes(request, want, widths));
  }
});

test("a row that failed lies in a rectangle like one that took no part, and its error stands beside it", () => {
  const lengths = [2, 0, 1];
  const rows = [0, 2].map((index) => ({ index, tokens: lengths[index]!, positionStart: 0, want: "hidden" as const }));
  const request = requestOf({ rows, want: "hidden", spelling: "container", rectangle: rectangleOf(lengths) });
  const outcomes: RowOutcome[] = [
    { kind: "error", error },
    { kind: "hidden", values: Uint16Array.of(7, 8, 9) },
  ];
  const { tensors, metadata } = decodeContainer(encodeReply(request, outcomes, widths).body as Uint8Array);
  expect(JSON.parse(metadata["errors"]!)).toEqual([error, null, null]);
  expect(tensors.get("attention_mask")!.data).toEqual(Uint8Array.of(0, 0, 0, 0, 0, 1));
  const states = new Uint16Array(tensors.get("hidden_states")!.data.slice().buffer);
  expect([...states]).toEqual([...Array(15).fill(0), 7, 8, 9]);
});

test.each([
  ["an error that says nothing", { token_ids: [null, 1], finish: [null, null], errors: [{}, null] }],
  ["fewer errors than rows", { token_ids: [null, 1], finish: [null, null], errors: [error] }],
  ["a token for a row that failed", { token_ids: [1, 1], finish: [null, null], errors: [error, null] }],
  ["no token for a row that did not fail", { token_ids: [null, 1], finish: [null, null] }],
  ["logprobs of something else", { token_ids: [1, 1], finish: [null, null], logprobs: [null, { logprob: "x" }] }],
])("%s is nonsense", (_, reply) => {
  const rows = Array.from({ length: 2 }, () => ({ tokens: 1, want: "token" as const }));
  const body = new TextEncoder().encode(JSON.stringify(reply));
  const read = () => decodeReply({ status: 200, contentType: "application/json", body }, { rows, ...widths });
  expect(read).toThrow(expect.objectContaining({ code: "malformed" }));
});

function requestOf(
  given: Pick<ForwardRequest, "rows" | "want" | "spelling"> & Partial<ForwardRequest>,
): ForwardRequest {
  const payload = { kind: "hidden", hiddenSize: 3, values: new Uint16Array(0) } as const;
  return { payload, rectangle: undefined, ...given };
}
