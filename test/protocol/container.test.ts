import { expect, test } from "bun:test";
import { bytesOf } from "../../src/base/bytes.ts";
import { type ContainerTensor, decodeContainer, encodeContainer } from "../../src/protocol/container.ts";
import { crc32c, crc32cHex } from "../../src/protocol/crc32c.ts";
import { checkCrc32c } from "../../src/protocol/digest.ts";
import { encodeFrame } from "../../src/protocol/frame.ts";
import type { NodeFacts } from "../../src/protocol/message.ts";
import { parseForward } from "../../src/protocol/parse.ts";
import { parseHeader } from "../../src/safetensors/header.ts";
import { SEEDS, seeded } from "./seeded.ts";

test.each(SEEDS)(
  "what goes into a container comes out of it, aligned, and any SafeTensors reader takes it (seed %d)",
  (seed) => {
    const random = seeded(seed);
    const tensors: ContainerTensor[] = ["ä", "b", 'c"', "__proto__x"].slice(0, random(5)).map((name) => {
      const shape = Array.from({ length: 1 + random(3) }, () => random(4));
      const length = shape.reduce((a, b) => a * b, 1);
      const values = Array.from({ length }, () => random(256));
      switch (random(3)) {
        case 0:
          return { name, dtype: "U8", shape, data: Uint8Array.from(values) };
        case 1:
          return { name, dtype: "BF16", shape, data: Uint16Array.from(values) };
        default:
          return { name, dtype: "I32", shape, data: Int32Array.from(values) };
      }
    });
    const metadata = { v: "1", text: 'quote " and ü', ["k".repeat(random(9))]: "any length of header" };
    const buffer = encodeContainer(tensors, metadata);
    expect(parseHeader(buffer, buffer.length, "it").size).toBe(tensors.length);

    // At an odd place in a larger buffer, as it may lie after it has been received.
    const moved = new Uint8Array(buffer.length + 3).subarray(3);
    moved.set(buffer);
    const decoded = decodeContainer(moved);
    expect(decoded.metadata).toEqual(metadata);
    for (const { name, dtype, shape, data } of tensors) {
      expect(decoded.tensors.get(name)).toEqual({ dtype, shape, data: bytesOf(data) });
      const begin = decodeContainer(buffer).tensors.get(name)!.data.byteOffset;
      expect(begin % { U8: 1, BF16: 2, I32: 4 }[dtype]).toBe(0);
    }
  },
);

test("a frame is read by the next node as it was meant", () => {
  const node: NodeFacts = {
    span: { start: 2, end: 3, total: 4 },
    hiddenSize: 2,
    vocabSize: 9,
    maxContext: 9,
    maxRows: 9,
    model: "m",
  };
  const values = Uint16Array.of(1, 2, 3, 4, 5, 6);
  const prefix = "0f".repeat(32);
  const rows = [
    { tokens: 2, positionStart: 4, want: "none", session: "a.1", step: 3, maxLen: 7, prefix },
    { tokens: 1, positionStart: 0, want: "token", sampling: { temperature: 0.5, seed: 9 } },
  ] as const;
  const call = { model: "m", fromLayer: 2, requestId: "r", deadlineMs: 7, route: ["x"] };
  const headers = new Headers({ "Content-Type": "application/x-safetensors" });
  for (const tokenIds of [undefined, Int32Array.of(8, 0, 7)]) {
    const body = encodeFrame({ values, hiddenSize: 2, tokenIds, rows, ...call });
    expect(parseForward({ headers, body }, node)).toEqual({
      spelling: "container",
      payload: { kind: "hidden", hiddenSize: 2, values },
      rows: rows.map((row, index) => ({ index, ...row })),
      rectangle: undefined,
      want: "token",
      ...(tokenIds && { tokenIds }),
      ...call,
    });
  }
});

test("what is wrong with one row of a frame is that row's, and the others go on", () => {
  const node: NodeFacts = {
    span: { start: 2, end: 3, total: 4 },
    hiddenSize: 1,
    vocabSize: 9,
    maxContext: 9,
    maxRows: 9,
    model: "m",
  };
  const row = { tokens: 1, positionStart: 0, want: "token" } as const;
  const rows = [row, { ...row, positionStart: 9, session: "a", step: 1 }, row, row];
  const values = Uint16Array.of(1, 2, 0x7f80, 3);
  const tokenIds = Int32Array.of(1, 2, 3, 9);
  const call = { model: "m", fromLayer: 2, requestId: "r", deadlineMs: 7 };
  const headers = new Headers({ "Content-Type": "application/x-safetensors" });
  const request = parseForward(
    { headers, body: encodeFrame({ values, hiddenSize: 1, tokenIds, rows, ...call }) },
    node,
  );
  expect(request.rows.map(({ problem }) => problem?.code as string | undefined)).toEqual([
    undefined,
    "context_exceeded",
    "non_finite",
    "token_id",
  ]);
});

test("the checksum is CRC-32C, as its published check values say", () => {
  expect(crc32c(new TextEncoder().encode("123456789")).toString(16)).toBe("e3069283");
  expect(crc32cHex(new Uint8Array(32))).toBe("8a9136aa"); // RFC 3720, B.4: 32 bytes of zeros
  expect(crc32cHex(new Uint8Array(0))).toBe("00000000");
});

test("a flipped bit in the data is noticed, whatever the case of the hex digits", () => {
  const data = Uint8Array.of(1, 2, 3, 4);
  const said = crc32cHex(data).toUpperCase();
  expect(() => checkCrc32c(said, data)).not.toThrow();
  expect(() => checkCrc32c(said, Uint8Array.of(1, 2, 3, 5))).toThrow(expect.objectContaining({ code: "corrupt" }));
});
