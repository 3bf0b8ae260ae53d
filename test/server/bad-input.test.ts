import { afterAll, beforeAll, expect, test } from "bun:test";
import { connect } from "node:net";
import { encodeContainer } from "../../src/protocol/container.ts";
import { base64, bytes, CONTEXT, errorOf, HIDDEN, post, startNode, type TinyNode, toBits, VOCAB } from "./tiny-node.ts";

/** A head without a next node, and the tail. */
let head: TinyNode;
let tail: TinyNode;
beforeAll(async () => {
  const limits = { maxBodyBytes: 20_000, maxOutputBytes: 3_000, maxRows: 8 };
  head = await startNode({ start: 0, end: 2, limits });
  tail = await startNode({ start: 2, end: 4, limits });
});
afterAll(() => Promise.all([head.stop(), tail.stop()]));

interface Bad {
  readonly what: string;
  readonly to: "head" | "tail";
  readonly type: string;
  readonly body: Body;
  readonly headers?: Record<string, string>;
  readonly code: keyof typeof STATUS;
  /** What the message must say: both numbers, usually. */
  readonly says?: RegExp;
}
type Body = string | Uint8Array;

const STATUS = {
  malformed: 400,
  corrupt: 400,
  version_mismatch: 400,
  from_layer: 409,
  model_mismatch: 409,
  too_large: 413,
  unsupported_spelling: 415,
  context_exceeded: 422,
  empty_prompt: 422,
  hidden_size: 422,
  impossible: 422,
  non_finite: 422,
  not_supported: 422,
  position_ids: 422,
  right_padding: 422,
  token_id: 422,
} as const;

const TEXT = "text/plain";
const JSON_TYPE = "application/json";
const RAW = "application/octet-stream";
const CONTAINER = "application/x-safetensors";

const states = bytes(toBits(Array.from({ length: 2 * 3 * HIDDEN }, (_, i) => i)));
const shape = { "X-Meshnet-Shape": `2,3,${HIDDEN}` };
const withNaN = bytes(toBits(Array.from({ length: 2 * 3 * HIDDEN }, (_, i) => (i === 4 * HIDDEN + 1 ? NaN : i))));
const withInfinity = bytes(toBits([...Array(3 * HIDDEN - 1).fill(0), -Infinity]));
const int32 = (...values: number[]) => base64(new Uint8Array(Int32Array.from(values).buffer));
const mask = (...values: number[]) => ({ ...shape, "X-Meshnet-Attn-Mask": base64(Uint8Array.from(values)) });
const sha256 = (body: string) => `sha-256=:${new Bun.CryptoHasher("sha256").update(body).digest("base64")}:`;

const hidden = { name: "hidden_states", dtype: "BF16", shape: [6, HIDDEN], data: states } as const;
const frame = (metadata: Record<string, string>, ...more: Parameters<typeof encodeContainer>[0]) =>
  encodeContainer([hidden, ...more], metadata);
const rows = (...given: object[]) => ({ rows: JSON.stringify(given) });

type Rest = [says?: RegExp, headers?: Record<string, string>];
const text = (what: string, body: Body, code: Bad["code"], ...[says, headers]: Rest): Bad => ({
  what,
  to: "head",
  type: TEXT,
  body,
  code,
  says,
  headers,
});
const json = (what: string, body: Body, code: Bad["code"], ...[says, headers]: Rest): Bad => ({
  what,
  to: "head",
  type: JSON_TYPE,
  body,
  code,
  says,
  headers,
});
const raw = (what: string, body: Body, headers: Record<string, string>, code: Bad["code"], says?: RegExp): Bad => ({
  what,
  to: "tail",
  type: RAW,
  body,
  headers,
  code,
  says,
});
const container = (what: string, body: Body, code: Bad["code"], ...[says, headers]: Rest): Bad => ({
  what,
  to: "tail",
  type: CONTAINER,
  body,
  code,
  says,
  headers,
});
/** A good text with a bad header. */
const said = (what: string, headers: Record<string, string>, code: Bad["code"], says?: RegExp): Bad => ({
  what,
  to: "head",
  type: TEXT,
  body: "a",
  headers,
  code,
  says,
});

const TABLE: readonly Bad[] = [
  json(
    "token ids nested thousands of lists deep",
    `{"input_ids":${"[".repeat(9_000)}${"]".repeat(9_000)}}`,
    "malformed",
  ),
  said("a mask for a prompt", { "X-Meshnet-Attn-Mask": base64(Uint8Array.of(1)) }, "malformed", /Attn-Mask/),
  raw(
    "too many raw rows",
    bytes(toBits(Array(9 * HIDDEN).fill(1))),
    { "X-Meshnet-Shape": `9,1,${HIDDEN}` },
    "impossible",
    /9 rows.* 8/,
  ),
  // text
  text("an empty prompt", "", "empty_prompt"),
  json("an empty prompt among others", '{"prompt":["a",""]}', "empty_prompt", /row 1/),
  json("no prompts", '{"prompt":[]}', "empty_prompt"),
  json("no token ids", '{"input_ids":[]}', "empty_prompt"),
  json("a row without token ids", '{"input_ids":[[1],[]]}', "empty_prompt", /row 1/),
  text("invalid UTF-8", Uint8Array.of(0x61, 0xff), "malformed", /UTF-8/),
  json("invalid UTF-8 in JSON", Uint8Array.of(0x22, 0xc3, 0x22), "malformed", /UTF-8/),
  json("half a surrogate pair", String.raw`{"prompt":"\ud83d"}`, "malformed", /surrogate/),
  { ...text("another charset", "a", "unsupported_spelling", /iso-8859-1/), type: "text/plain; charset=iso-8859-1" },
  json("JSON that is none", '{"prompt":', "malformed"),
  json("JSON that is no object", '["a"]', "malformed"),
  json("JSON null", "null", "malformed"),
  json("a prompt that is a number", '{"prompt":7}', "malformed"),
  json("a prompt among which is a number", '{"prompt":["a",7]}', "malformed", /row 1/),
  json("neither prompt nor token ids", "{}", "malformed", /neither/),
  json("prompt and token ids", '{"prompt":"a","input_ids":[[1]]}', "malformed", /both/),
  json("an unknown field", '{"prompt":"a","max_tokens":3}', "malformed", /max_tokens/),
  json("add_special_tokens that is text", '{"prompt":"a","add_special_tokens":"no"}', "malformed"),
  json("token ids that are no list", '{"input_ids":5}', "malformed"),
  json("token ids without rows", '{"input_ids":[1,2]}', "malformed", /row 0/),
  json("half a token id", '{"input_ids":[[1,2.5]]}', "malformed", /2\.5 at slot 1/),
  json("a token id that is text", '{"input_ids":[["1"]]}', "malformed"),
  json("a token id beyond the vocabulary", `{"input_ids":[[1],[1,${VOCAB}]]}`, "token_id", /row 1.*256 at slot 1.*255/),
  json("a token id below 0", '{"input_ids":[[-1]]}', "token_id", /-1/),
  json("a token id of 2^32 + 1, which is 1 in 32 bits", '{"input_ids":[[4294967297]]}', "token_id", /4294967297/),
  text("more tokens than the context", "a".repeat(CONTEXT), "context_exceeded", /41 tokens.*40/),
  json("a mask for a prompt of token ids of different lengths", '{"input_ids":[[1],[1,2]]}', "malformed", undefined, {
    "X-Meshnet-Attn-Mask": "AAAA",
  }),
  json("too many rows", JSON.stringify({ input_ids: Array(9).fill([1]) }), "impossible", /9 rows.*8/),
  said("a shape for text", shape, "malformed"),
  { ...text("text to a node that is not the head", "a", "unsupported_spelling", /layers 2-4 of 4/), to: "tail" },
  container(
    "token ids to a node that is not the head",
    encodeContainer([{ name: "input_ids", dtype: "I32", shape: [1], data: Int32Array.of(1) }]),
    "unsupported_spelling",
  ),
  { ...text("an unknown content type", "a", "unsupported_spelling", /image\/png/), type: "image/png" },
  // raw
  raw("no shape", states, {}, "malformed", /X-Meshnet-Shape/),
  raw("a shape of two numbers", states, { "X-Meshnet-Shape": "2,3" }, "malformed"),
  raw("a shape of words", states, { "X-Meshnet-Shape": "a,b,c" }, "malformed"),
  raw("a shape with a 0", "", { "X-Meshnet-Shape": `1,0,${HIDDEN}` }, "malformed"),
  raw("a negative shape", states, { "X-Meshnet-Shape": "-2,-3,4" }, "malformed"),
  raw(
    "a shape that does not match the body",
    states,
    { "X-Meshnet-Shape": `2,4,${HIDDEN}` },
    "malformed",
    /64 bytes.*48/,
  ),
  raw("a shape of 2^31", states, { "X-Meshnet-Shape": `2147483648,1,${HIDDEN}` }, "malformed", /17179869184 bytes.*48/),
  raw(
    "a shape whose product wraps round to the body's size",
    states,
    { "X-Meshnet-Shape": "4294967296,4294967296,24" },
    "malformed",
  ),
  raw("an odd number of bytes", states.subarray(1), shape, "malformed", /47 bytes/),
  raw("another hidden size", states, { "X-Meshnet-Shape": "1,3,8" }, "hidden_size", /8 wide.*4/),
  raw("a NaN", withNaN, shape, "non_finite", /row 1 at slot 1/),
  raw(
    "an infinity behind padding",
    withInfinity,
    { "X-Meshnet-Shape": `1,3,${HIDDEN}`, "X-Meshnet-Attn-Mask": "AAAB" },
    "non_finite",
    /row 0 at slot 2/,
  ),
  raw("a mask of another length", states, mask(1, 1, 1), "malformed", /3 bytes.*6/),
  raw("a mask that is not base64", states, { ...shape, "X-Meshnet-Attn-Mask": "?" }, "malformed"),
  raw("right padding", states, mask(1, 1, 1, 1, 1, 0), "right_padding", /row 1.*slot 2/),
  raw("a hole in the mask", states, mask(1, 0, 1, 1, 1, 1), "right_padding", /row 0.*slot 1/),
  raw("a mask with a 2", states, mask(0, 2, 1, 1, 1, 1), "malformed", /2 at slot 1/),
  raw("a mask of zeros only", states, mask(0, 0, 0, 0, 0, 0), "empty_prompt"),
  raw(
    "positions that differ",
    states,
    { ...shape, "X-Meshnet-Position-Ids": int32(0, 1, 2, 1, 2, 3) },
    "position_ids",
    /1 in row 1 at slot 0.*position 0/,
  ),
  raw(
    "positions of another length",
    states,
    { ...shape, "X-Meshnet-Position-Ids": int32(0, 1) },
    "malformed",
    /8 bytes.*24/,
  ),
  // container
  container("a container that is none", "hello", "malformed"),
  container("an empty container", "", "malformed"),
  container("a container cut short", frame({}).slice(0, -1), "malformed"),
  container(
    "a container whose header is longer than itself",
    Uint8Array.of(255, 255, 255, 255, 0, 0, 0, 0, 123),
    "malformed",
  ),
  container("a container without tensors", encodeContainer([]), "malformed", /neither/),
  container(
    "an unknown tensor",
    frame({}, { name: "kv", dtype: "U8", shape: [1], data: Uint8Array.of(1) }),
    "malformed",
    /kv/,
  ),
  container(
    "hidden states in another dtype",
    encodeContainer([{ name: "hidden_states", dtype: "I32", shape: [1, 4], data: Int32Array.of(1, 2, 3, 4) }]),
    "malformed",
    /I32/,
  ),
  container("rows that do not add up", frame(rows({ n: 2 }, { n: 3 })), "malformed", /5 tokens.*6/),
  container("a row of no tokens", frame(rows({ n: 6 }, { n: 0 })), "malformed", /rows\[1\]/),
  container("an unknown field of a row", frame(rows({ n: 6, position: 0 })), "malformed", /position/),
  container("rows that are no list", frame({ rows: "{}" }), "malformed"),
  container(
    "a mask that does not fit the hidden states",
    frame({}, { name: "attention_mask", dtype: "U8", shape: [1, 6], data: new Uint8Array(6).fill(1) }),
    "malformed",
  ),
  container("a header that contradicts the metadata", frame({ from_layer: "2" }), "malformed", /"3".*"2"/, {
    "X-Meshnet-From-Layer": "3",
  }),
  container("a header that contradicts a row", frame(rows({ n: 6, want: "hidden" })), "malformed", undefined, {
    "X-Meshnet-Want": "token",
  }),
  container("a shape header beside a container", frame({}), "malformed", undefined, shape),
  container("a checksum that does not fit", frame({ crc32c: "00000000" }), "corrupt"),
  container("a checksum that is none", frame({ crc32c: "zero" }), "malformed"),
  container("another version in the metadata", frame({ v: "2" }), "version_mismatch", /"2".*version 1/),
  container("another layer in the metadata", frame({ from_layer: "1" }), "from_layer", /layer 1.*2-4/),
  container("another model in the metadata", frame({ model: "other" }), "model_mismatch", /other.*digest-of-tiny/),
  container(
    "rows that want different things",
    frame(rows({ n: 3, want: "token" }, { n: 3, want: "hidden" })),
    "not_supported",
  ),
  container(
    "rows that want three different things",
    frame(rows({ n: 2, want: "none" }, { n: 2, want: "token" }, { n: 2, want: "logits" })),
    "not_supported",
    /row 1/,
  ),
  container(
    "a session without a step",
    frame(rows({ n: 3, session: "a.0", step: 1 }, { n: 3, session: "b" })),
    "malformed",
    /row 1.*b and no step/,
  ),
  container(
    "a prefix that is no digest",
    frame(rows({ n: 6, session: "a", step: 1, pos_start: 4, prefix: "ABC" })),
    "malformed",
    /ABC/,
  ),
  container(
    "a prefix of nothing",
    frame(rows({ n: 6, session: "a", step: 1, prefix: "0".repeat(64) })),
    "malformed",
    /pos_start/,
  ),
  container(
    "a prefix without a session",
    frame(rows({ n: 6, pos_start: 4, prefix: "0".repeat(64) })),
    "not_supported",
    /prefix/,
  ),
  container(
    "token ids that are not as many as the tokens",
    frame({}, { name: "token_ids", dtype: "I32", shape: [5], data: new Int32Array(5) }),
    "malformed",
    /5 ids for 6 tokens/,
  ),
  container(
    "token ids beyond the vocabulary beside hidden states",
    frame({}, { name: "token_ids", dtype: "I32", shape: [6], data: Int32Array.of(1, 2, VOCAB, 4, 5, 6) }),
    "token_id",
    /256 at slot 2/,
  ),
  container(
    "room for more than the context",
    frame(rows({ n: 6, session: "a", step: 1, max_len: 41 })),
    "context_exceeded",
    /41/,
  ),
  // any spelling
  said("another version", { "X-Meshnet-Version": "2" }, "version_mismatch", /"2".*version 1/),
  raw("another layer", states, { ...shape, "X-Meshnet-From-Layer": "0" }, "from_layer", /layer 0.*2-4/),
  raw("a layer that is no number", states, { ...shape, "X-Meshnet-From-Layer": "two" }, "malformed"),
  said("another model", { "X-Meshnet-Model": "other" }, "model_mismatch", /other.*digest-of-tiny/),
  said("a digest that does not fit", { "Content-Digest": sha256("b") }, "corrupt"),
  said("a digest that is none", { "Content-Digest": "sha-256=abc" }, "malformed"),
  said("an unknown wish", { "X-Meshnet-Want": "tokens" }, "malformed"),
  said("more values than rows", { "X-Meshnet-Want": "token,token" }, "malformed", /2 values for 1 rows/),
  said("a session without a step", { "X-Meshnet-Session": "abc" }, "malformed", /abc and no step/),
  said("a step without a session", { "X-Meshnet-Step": "1" }, "not_supported", /step/),
  said("a session id with a slash", { "X-Meshnet-Session": "a/b" }, "malformed"),
  said("a start behind 0", { "X-Meshnet-Pos-Start": "3" }, "not_supported"),
  said("a start below 0", { "X-Meshnet-Pos-Start": "-1" }, "malformed"),
  said("room for a session", { "X-Meshnet-Max-Len": "8" }, "not_supported"),
  said("sampling that is no JSON", { "X-Meshnet-Sampling": "hot" }, "malformed"),
  said("sampling out of its range", { "X-Meshnet-Sampling": '{"top_p":2}' }, "malformed", /top_p/),
  said("an unknown sampling field", { "X-Meshnet-Sampling": '{"heat":2}' }, "malformed", /heat/),
  said("a route that is none", { "X-Meshnet-Route": "home" }, "malformed"),
  said("a route to a node that was never admitted", { "X-Meshnet-Route": '["http://127.0.0.1:1"]' }, "not_supported"),
  said("a deadline that is no number", { "X-Meshnet-Deadline-Ms": "soon" }, "malformed"),
  said("a request id with a space", { "X-Meshnet-Request-Id": "a b" }, "malformed"),
  // sizes
  text("a body longer than the limit", "a".repeat(20_001), "too_large"),
  raw("a reply longer than the limit", states, { ...shape, "X-Meshnet-Want": "all_logits" }, "too_large", /all_logits/),
];

test.each(TABLE)("$what: $code, and the node goes on serving", async (bad) => {
  const node = bad.to === "tail" ? tail : head;
  const before = node.stage.calls;
  const reply = await post(node.url, bad.body, bad.type, bad.headers);
  const error = await errorOf(reply);
  expect([reply.status, error.code]).toEqual([STATUS[bad.code], bad.code]);
  if (bad.says) expect(error.message).toMatch(bad.says);
  expect(error).toMatchObject({ layers: bad.to === "tail" ? "2-4" : "0-2", hint: expect.stringMatching(/./) });
  expect(error.node).toBe(reply.headers.get("X-Meshnet-Node")!);
  expect(node.stage.calls).toBe(before);
  await expectServing();
});

test("sampling that is greedy after all, and a session's fields that say nothing, are taken", async () => {
  const headers = { ...shape, "X-Meshnet-Sampling": '{"temperature":0,"top_k":1},{}', "X-Meshnet-Pos-Start": "0" };
  expect((await post(tail.url, states, RAW, headers)).status).toBe(200);
});

test("a body with the right digest, and a container with the right checksum, are taken", async () => {
  expect((await post(head.url, "a", TEXT, { "Content-Digest": `sha-512=:x:, ${sha256("a")}` })).status).toBe(200);
});

test("an unknown path is 404 and a wrong method 405, in JSON", async () => {
  const missing = await fetch(new URL("forwards", head.url), { method: "POST" });
  expect([missing.status, (await errorOf(missing)).code]).toEqual([404, "not_found"]);
  for (const [method, path, allow] of [
    ["GET", "forward", "POST"],
    ["POST", "info", "GET"],
    ["DELETE", "health/ready", "GET"],
  ] as const) {
    const reply = await fetch(new URL(path, head.url), { method });
    expect([reply.status, (await errorOf(reply)).code, reply.headers.get("Allow")]).toEqual([
      405,
      "method_not_allowed",
      allow,
    ]);
  }
});

test("a declared length above the limit is refused before the body comes, an undeclared one while it comes", async () => {
  const declared = await talk(head, "Content-Length: 10000000000\r\n\r\nonly this");
  expect(declared).toStartWith("HTTP/1.1 413");
  expect(declared).toContain('"too_large"');
  const chunk = `8000\r\n${"a".repeat(0x8000)}\r\n`;
  const undeclared = await talk(head, `Transfer-Encoding: chunked\r\n\r\n${chunk}`);
  expect(undeclared).toStartWith("HTTP/1.1 413");
  expect(undeclared).toContain('"too_large"');
  await expectServing();
});

test("a call that breaks off in the middle of its body does no harm", async () => {
  const socket = connect(head.server.port, "127.0.0.1");
  socket.write(
    "POST /forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\nonly this",
  );
  await Bun.sleep(20);
  socket.destroy();
  await Bun.sleep(20);
  await expectServing();
});

async function expectServing(): Promise<void> {
  const headers = { "X-Meshnet-Want": "hidden", "X-Meshnet-Shape": `1,1,${HIDDEN}` };
  const reply = await post(tail.url, states.subarray(0, 2 * HIDDEN), RAW, headers);
  expect(reply.status).toBe(200);
  expect((await post(head.url, "a", TEXT)).status).toBe(200);
}

/** Sends bytes that fetch would not, and gives what came back until the reply was whole. */
function talk(node: TinyNode, rest: string): Promise<string> {
  return new Promise((resolve, reject) => {
    const socket = connect(node.server.port, "127.0.0.1");
    let reply = "";
    socket.on("data", (data) => {
      reply += data;
      if (!reply.endsWith("}")) return;
      resolve(reply);
      socket.destroy();
    });
    socket.on("error", reject);
    socket.on("close", () => resolve(reply));
    socket.write(`POST /forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n${rest}`);
  });
}
