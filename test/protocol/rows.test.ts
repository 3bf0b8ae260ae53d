import { describe, expect, test } from "bun:test";
import { checkRowFields, mergeRowFields, rowFieldsOfHeaders, rowFieldsOfMetadata } from "../../src/protocol/rows.ts";

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
    const prefix = "0a".repeat(32);
    const same = { n: 1, step: 2, prefix, want: "none", sampling: { seed: 1 } } as const;
    const rows = [{ session: "a.1", pos_start: 5, max_len: 9, ...same }];
    expect(rowFieldsOfMetadata(JSON.stringify(rows))).toEqual([
      { session: "a.1", positionStart: 5, maxLen: 9, ...same },
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

describe("what rows of one call may want", () => {
  test.each([
    [["token", "token"], "token"],
    [["token", "none"], "token"],
    [["none", "token", undefined], "token"],
    [["none", "none"], "none"],
    [["logits", "logits"], "logits"],
    [[undefined], "token"],
  ] as const)("%j is a call for %s", (wants, want) => {
    expect(checkRowFields(wants.map((want) => ({ want })))).toBe(want);
  });

  test.each([
    [["token", "logits"], 1],
    [["none", "none", "hidden"], 2],
    [["token", "none", "all_logits"], 1],
  ] as const)("%j is refused, with a row that differs", (wants, row) => {
    const refused = () => checkRowFields(wants.map((want) => ({ want })));
    expect(refused).toThrow(expect.objectContaining({ code: "not_supported", details: { row } }));
  });
});

test.each([
  [{ session: "a" }, "malformed"], // no step
  [{ session: "a", step: 1, prefix: "0".repeat(64) }, "malformed"], // of how many tokens?
  [{ step: 1 }, "not_supported"],
  [{ maxLen: 4 }, "not_supported"],
  [{ positionStart: 4 }, "not_supported"],
  [{ positionStart: 4, prefix: "0".repeat(64) }, "not_supported"],
])("%j makes no sense: %s", (fields, code) => {
  expect(() => checkRowFields([{ session: "b", step: 0 }, fields])).toThrow(
    expect.objectContaining({ code, details: { row: 1 } }),
  );
});
