import { describe, expect, test } from "bun:test";
import { isGreedy, mergeRowFields, rowFieldsOfHeaders, rowFieldsOfMetadata } from "../../src/protocol/rows.ts";

describe("headers", () => {
  test("give one value for all rows, or one for each", () => {
    const headers = new Headers({
      "X-Meshnet-Pos-Start": "3, 4",
      "X-Meshnet-Want": "logits",
      "X-Meshnet-Step": "7",
      "X-Meshnet-Sampling": '{"top_k":1,"stop_token_ids":[1,2]},{"temperature":0}',
    });
    expect(rowFieldsOfHeaders(headers, 2)).toEqual([
      { positionStart: 3, want: "logits", step: 7, sampling: { top_k: 1, stop_token_ids: [1, 2] } },
      { positionStart: 4, want: "logits", step: 7, sampling: { temperature: 0 } },
    ] as never);
  });

  test("name the sessions of a batch row by row", () => {
    const headers = new Headers({ "X-Meshnet-Session": "chat" });
    expect(rowFieldsOfHeaders(headers, 1).map(({ session }) => session)).toEqual(["chat"]);
    expect(rowFieldsOfHeaders(headers, 2).map(({ session }) => session)).toEqual(["chat.0", "chat.1"]);
  });

  test.each(["-1", "1.5", "1e3", "0x1", "99999999999999999999", "", "1,,2"])("do not take %j for a count", (text) => {
    const headers = new Headers({ "X-Meshnet-Step": text });
    expect(() => rowFieldsOfHeaders(headers, 3)).toThrow(expect.objectContaining({ code: "malformed" }));
  });
});

describe("metadata", () => {
  test("says the same of rows as JSON", () => {
    const rows = [{ session: "a.1", pos_start: 5, n: 1, step: 2, max_len: 9, want: "none", sampling: { seed: 1 } }];
    expect(rowFieldsOfMetadata(JSON.stringify(rows))).toEqual([
      { session: "a.1", positionStart: 5, n: 1, step: 2, maxLen: 9, want: "none", sampling: { seed: 1 } },
    ]);
  });

  test("is filled up by headers that do not contradict it", () => {
    const filled = mergeRowFields([{ n: 2, want: "none" }], [{ want: "none", positionStart: 0 }]);
    expect(filled).toEqual([{ n: 2, want: "none", positionStart: 0 }]);
    expect(() => mergeRowFields([{ want: "none" }], [{ want: "token" }])).toThrow(/none/);
  });

  test.each(['"x"', "[1]", "[null]", '[{"n":-1}]', '[{"n":1.5}]', '[{"session":"a b"}]', '[{"want":"all"}]', "[{"])(
    "%j is malformed",
    (text) => {
      expect(() => rowFieldsOfMetadata(text)).toThrow(expect.objectContaining({ code: "malformed" }));
    },
  );
});

test.each([
  [undefined, true],
  [{}, true],
  [{ temperature: 0, top_k: 40, seed: 3 }, true], // nothing to choose from
  [{ temperature: 0, repetition_penalty: 1, stop_token_ids: [] }, true],
  [{ temperature: 1 }, false],
  [{ top_k: 40 }, false],
  [{ temperature: 0, repetition_penalty: 1.1 }, false],
  [{ logprobs: 2 }, false],
  [{ temperature: 0, stop_token_ids: [5] }, false], // ends elsewhere than greedy alone
])("sampling %j is greedy: %j", (sampling, greedy) => {
  expect(isGreedy(sampling)).toBe(greedy);
});
