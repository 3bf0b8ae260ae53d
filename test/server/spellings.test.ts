import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { decodeContainer, encodeContainer } from "../../src/protocol/container.ts";
import { halves } from "../../src/protocol/raw.ts";
import {
  base64,
  bytes,
  fromBits,
  HIDDEN,
  post,
  postJson,
  startChain,
  startNode,
  type TinyNode,
  toBits,
  VOCAB,
} from "./tiny-node.ts";

let chain: TinyNode[];
let whole: TinyNode;
beforeAll(async () => {
  chain = await startChain([2]);
  whole = await startNode({ start: 0, end: 4 });
});
afterAll(() => Promise.all([...chain, whole].map((node) => node.stop())));

const raw = (url: string, values: Uint8Array, headers: Record<string, string>) =>
  post(url, values, "application/octet-stream", headers);
const container = (url: string, body: Uint8Array, headers?: Record<string, string>) =>
  post(url, body, "application/x-safetensors", headers);
const LOCAL = { "X-Meshnet-Route": "local" };

describe("one message, three spellings", () => {
  test("text, JSON, token ids, raw and container give the same token, on one node and on two", async () => {
    const ids = [0, ...new TextEncoder().encode("hello")]; // 111 at position 5, layers 10, attention 4 · 532 mod 64: 142
    for (const head of [whole, chain[0]!]) {
      const replies = await Promise.all([
        post(head.url, "hello", "text/plain; charset=UTF-8"),
        postJson(head.url, { prompt: "hello" }),
        postJson(head.url, { prompt: ["hello"] }),
        postJson(head.url, { input_ids: [ids] }),
        container(
          head.url,
          encodeContainer([{ name: "input_ids", dtype: "I32", shape: [6], data: Int32Array.from(ids) }]),
        ),
      ]);
      const tokens = await Promise.all(
        replies.map(async (reply) => ((await reply.json()) as { token_ids: number[] }).token_ids),
      );
      expect(tokens).toEqual(Array(5).fill([142]));
    }
  });

  test("the tail gives the same for hidden states sent raw and in a container", async () => {
    const states = await (await post(chain[0]!.url, "hello", "text/plain", LOCAL)).bytes();
    const tail = chain[1]!.url;
    const shape = {
      "X-Meshnet-Shape": `1,6,${HIDDEN}`,
      "X-Meshnet-From-Layer": "2",
      "X-Meshnet-Model": "digest-of-tiny",
    };
    const tensor = { name: "hidden_states", dtype: "BF16", shape: [6, HIDDEN], data: states } as const;
    const replies = await Promise.all([raw(tail, states, shape), container(tail, encodeContainer([tensor]))]);
    for (const reply of replies) expect(await reply.json()).toEqual({ token_ids: [142], finish: [null] });
  });

  test("a prompt's bytes are the prompt, white space at its ends too", async () => {
    const reply = await post(whole.url, " \ufeffa \n", "text/plain");
    expect(await reply.json()).toMatchObject({ prompt_token_ids: [[0, 0x20, 0xef, 0xbb, 0xbf, 0x61, 0x20, 0x0a]] });
  });

  test("a batch of prompts of different lengths gives what each prompt gives alone", async () => {
    const prompts = ["a", "hello", "grüße"];
    const together = (await (await postJson(chain[0]!.url, { prompt: prompts })).json()) as { token_ids: number[] };
    const alone = await Promise.all(
      prompts.map(
        async (prompt) =>
          ((await (await postJson(whole.url, { prompt })).json()) as { token_ids: number[] }).token_ids[0]!,
      ),
    );
    expect(together.token_ids).toEqual(alone);
  });

  test("special tokens can be left away", async () => {
    const reply = await postJson(whole.url, { prompt: "hi", add_special_tokens: false });
    expect(await reply.json()).toMatchObject({ prompt_token_ids: [[104, 105]] });
  });
});

describe("a reply that is not a token", () => {
  test("a node without a next one answers text with hidden states, and with the mask it made where a row is padded", async () => {
    const reply = await postJson(chain[0]!.url, { input_ids: [[7], [1, 2, 3]] }, LOCAL);
    expect(reply.headers.get("Content-Type")).toBe("application/octet-stream");
    expect(reply.headers.get("X-Meshnet-Shape")).toBe(`2,3,${HIDDEN}`);
    expect(reply.headers.get("X-Meshnet-Attn-Mask")).toBe(base64(Uint8Array.of(0, 0, 1, 1, 1, 1)));
    expect(reply.headers.get("X-Meshnet-Layers")).toBe("0-2");
    expect(reply.headers.get("X-Meshnet-Cache-Len")).toBe("0,0");
    expect(reply.headers.get("X-Meshnet-Numerics")).toBe("tiny-numerics");
    expect(reply.headers.get("Server-Timing")).toMatch(/^queue;dur=[\d.]+, stage;dur=[\d.]+, total;dur=[\d.]+$/);
    const states = Array.from(halves(await reply.bytes()), fromBits);
    expect(states.slice(0, 12)).toEqual([0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 3, 14]);

    const even = await postJson(
      chain[0]!.url,
      {
        input_ids: [
          [7, 8],
          [1, 2],
        ],
      },
      LOCAL,
    );
    expect(even.headers.has("X-Meshnet-Attn-Mask")).toBe(false);
  });

  test("what the head answered, passed on by hand with its mask, is what the chain answers", async () => {
    const prompts = { prompt: ["a", "hello"] };
    const first = await postJson(chain[0]!.url, prompts, LOCAL);
    const byHand = await raw(chain[1]!.url, await first.bytes(), {
      "X-Meshnet-Shape": first.headers.get("X-Meshnet-Shape")!,
      "X-Meshnet-Attn-Mask": first.headers.get("X-Meshnet-Attn-Mask")!,
    });
    const { token_ids, finish } = (await (await postJson(chain[0]!.url, prompts)).json()) as Record<string, unknown>;
    expect(await byHand.json()).toEqual({ token_ids, finish });
  });

  test("padding comes back as zeros, whatever stood there, and a row of zeros takes no part", async () => {
    const values = toBits(Array.from({ length: 3 * 2 * HIDDEN }, (_, i) => i));
    const headers = {
      "X-Meshnet-Shape": `3,2,${HIDDEN}`,
      "X-Meshnet-Attn-Mask": base64(Uint8Array.of(0, 1, 0, 0, 1, 1)),
      "X-Meshnet-Position-Ids": base64(bytes32([99, 0, 99, 99, 0, 1])),
    };
    const hidden = await raw(chain[1]!.url, bytes(values), { ...headers, "X-Meshnet-Want": "hidden" });
    const states = Array.from(halves(await hidden.bytes()), fromBits);
    expect(states.slice(0, 4)).toEqual([0, 0, 0, 0]);
    expect(states.slice(4, 8)).toEqual([4, 5, (6 + 7) % 64, (7 + 8) % 64]);
    expect(states.slice(8, 16)).toEqual(Array(8).fill(0));
    const tokens = (await (await raw(chain[1]!.url, bytes(values), headers)).json()) as {
      token_ids: (number | null)[];
    };
    expect(tokens).toMatchObject({
      token_ids: [expect.any(Number), null, expect.any(Number)],
      finish: [null, null, null],
    });
  });

  test.each([
    { want: "logits", shape: `2,1,${VOCAB}` },
    { want: "all_logits", shape: `2,5,${VOCAB}` },
    { want: "hidden", shape: `2,5,${HIDDEN}` },
  ])("$want comes through the chain as the one node gives it", async ({ want, shape }) => {
    const body = {
      input_ids: [
        [1, 2],
        [3, 4, 5, 6, 7],
      ],
    };
    const [split, alone] = await Promise.all(
      [chain[0]!, whole].map((node) => postJson(node.url, body, { "X-Meshnet-Want": want })),
    );
    expect(split!.headers.get("X-Meshnet-Shape")).toBe(shape);
    expect(split!.headers.get("X-Meshnet-Layers")).toBe("0-4");
    expect(await split!.bytes()).toEqual(await alone!.bytes());
  });

  test("none is 204 without a body", async () => {
    const reply = await postJson(chain[0]!.url, { prompt: "x" }, { "X-Meshnet-Want": "none" });
    expect([reply.status, await reply.text()]).toEqual([204, ""]);
  });

  test("a container is answered with a container: rows as rows, a rectangle as a rectangle with its mask", async () => {
    const data = toBits([1, 0, 0, 0, 2, 0, 0, 0, 3, 1, 0, 0]);
    const rows = JSON.stringify([
      { n: 1, want: "hidden" },
      { n: 2, want: "hidden", pos_start: 0 },
    ]);
    const asRows = await container(
      chain[1]!.url,
      encodeContainer([{ name: "hidden_states", dtype: "BF16", shape: [3, HIDDEN], data }], {
        v: "1",
        rows,
        from_layer: "2",
      }),
    );
    const states = decodeContainer(await asRows.bytes()).tensors.get("hidden_states")!;
    expect(states).toMatchObject({ dtype: "BF16", shape: [3, HIDDEN] });

    const padded = toBits([9, 9, 9, 9, 1, 0, 0, 0, 2, 0, 0, 0, 3, 1, 0, 0]);
    const asRectangle = await container(
      chain[1]!.url,
      encodeContainer([
        { name: "hidden_states", dtype: "BF16", shape: [2, 2, HIDDEN], data: padded },
        { name: "attention_mask", dtype: "U8", shape: [2, 2], data: Uint8Array.of(0, 1, 1, 1) },
      ]),
      { "X-Meshnet-Want": "hidden" },
    );
    const { tensors } = decodeContainer(await asRectangle.bytes());
    expect(tensors.get("hidden_states")!.shape).toEqual([2, 2, HIDDEN]);
    expect(tensors.get("hidden_states")!.data.subarray(HIDDEN * 2)).toEqual(states.data);
    expect(tensors.get("attention_mask")!.data).toEqual(Uint8Array.of(0, 1, 1, 1));
  });

  test("logits in a container are called logits", async () => {
    const tensor = { name: "input_ids", dtype: "I32", shape: [3], data: Int32Array.of(1, 2, 3) } as const;
    const rows = JSON.stringify([
      { n: 2, want: "logits" },
      { n: 1, want: "logits" },
    ]);
    const reply = await container(chain[0]!.url, encodeContainer([tensor], { rows }));
    expect(decodeContainer(await reply.bytes()).tensors.get("logits")).toMatchObject({
      dtype: "BF16",
      shape: [2, 1, VOCAB],
    });
  });
});

describe("a head's token reply reads like text", () => {
  test("a character spread over two tokens comes out whole with the token that completes it", async () => {
    const stage = { start: 0, end: 4, token: 0xa9 };
    const node = await startNode(stage);
    const whole = await postJson(node.url, { input_ids: [[0x61, 0xc3], [0x61]] });
    expect(await whole.json()).toEqual({ token_ids: [0xa9, 0xa9], finish: [null, null], text: ["é", "�"] });
    await node.stop();
    const begun = await startNode({ ...stage, token: 0xc3 });
    expect(await (await postJson(begun.url, { prompt: "a" })).json()).toMatchObject({
      text: [""],
      prompt_token_ids: [[0, 0x61]],
    });
    await begun.stop();
  });

  test("a token that ends the sequence is reported as stop and reads like nothing", async () => {
    const node = await startNode({ start: 0, end: 4, token: 10, eosTokenIds: [10] });
    expect(await (await postJson(node.url, { prompt: "a" })).json()).toMatchObject({
      token_ids: [10],
      finish: ["stop"],
      text: [""],
    });
    await node.stop();
  });

  test("token ids that the caller padded himself go with his mask", async () => {
    const reply = await postJson(
      chain[0]!.url,
      {
        input_ids: [
          [50, 7],
          [1, 2],
        ],
      },
      { "X-Meshnet-Attn-Mask": base64(Uint8Array.of(0, 1, 1, 1)) },
    );
    const alone = (await (await postJson(whole.url, { input_ids: [[7], [1, 2]] })).json()) as { token_ids: number[] };
    expect(await reply.json()).toMatchObject({ token_ids: alone.token_ids });
  });
});

function bytes32(values: number[]): Uint8Array {
  return new Uint8Array(Int32Array.from(values).buffer);
}
