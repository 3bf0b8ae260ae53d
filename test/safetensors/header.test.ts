import { describe, expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { parseHeader, readHeader } from "../../src/safetensors/header.ts";
import { fileWithHeader, safetensorsFile, temporaryFolder } from "../support/safetensors.ts";

const parse = (file: Uint8Array) => parseHeader(file, file.length, "model.safetensors");
const zeros = (length: number) => new Uint8Array(length);
const ONE = '"x":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}';

test("a header gives each tensor's dtype, shape and place in the file", () => {
  const file = safetensorsFile({
    "h.0.weight": { dtype: "F32", shape: [2, 3], data: zeros(24) },
    "h.0.bias": { dtype: "BF16", shape: [3], data: zeros(6) },
  });
  const start = file.length - 30;
  expect([...parse(file).values()]).toEqual([
    { name: "h.0.weight", dtype: "F32", shape: [2, 3], begin: start, end: start + 24 },
    { name: "h.0.bias", dtype: "BF16", shape: [3], begin: start + 24, end: start + 30 },
  ]);
});

test("a header is read from a file without its data", () => {
  using folder = temporaryFolder();
  const path = join(folder.path, "model.safetensors");
  writeFileSync(path, safetensorsFile({ x: { dtype: "U8", shape: [5], data: zeros(5) } }));
  expect(readHeader(path).get("x")?.shape).toEqual([5]);
});

test("a file that is not there or is a directory is refused by name", () => {
  using folder = temporaryFolder();
  expect(() => readHeader(join(folder.path, "none.safetensors"))).toThrow("none.safetensors cannot be opened: ENOENT");
  expect(() => readHeader(folder.path)).toThrow(UserError);
});

test("the eight bytes of length may stand at any alignment", () => {
  const file = fileWithHeader(`{${ONE}}`, zeros(4));
  const shifted = new Uint8Array(file.length + 3);
  shifted.set(file, 3);
  expect(parse(shifted.subarray(3)).size).toBe(1);
});

describe("a valid header, however odd, is accepted", () => {
  const cases: [why: string, header: string, data: number][] = [
    ["no tensors at all", "{}", 0],
    ["white space before and after", ` \n\t\r{${ONE}}   `, 4],
    ["a scalar", '{"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', 4],
    ["an empty tensor", '{"x":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]}}', 0],
    ["an empty tensor where another begins", `{${ONE},"e":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}`, 4],
    ["entries in another order than their data", `{"y":{"dtype":"I8","shape":[2],"data_offsets":[4,6]},${ONE}}`, 6],
    ["an empty name", '{"":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1],
    ["the name __proto__", '{"__proto__":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1],
    ["an escaped name", '{"\\u00e4\\n\\ud83d\\ude00":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1],
    ["a field this version does not know", '{"x":{"dtype":"I8","shape":[1],"data_offsets":[0,1],"z":[-4.5e3]}}', 1],
    ["an entry written as a list", '{"x":["I8",[4],[0,4]]}', 4],
    ["null metadata", `{"__metadata__":null,${ONE}}`, 4],
    ["a metadata key given twice", `{"__metadata__":{"a":"1","a":"2"},${ONE}}`, 4],
    ["sub-byte elements that fill their bytes", '{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}', 3],
  ];
  test.each(cases)("%s", (_, header, data) => {
    expect(() => parse(fileWithHeader(header, zeros(data)))).not.toThrow();
  });
});

describe("a header that breaks a rule is refused, with what is wrong in it", () => {
  const entry = (dtype: string, shape: string, offsets: string) =>
    `{"x":{"dtype":${dtype},"shape":${shape},"data_offsets":${offsets}}}`;
  const cases: [problem: string | RegExp, header: string | Uint8Array, data: number][] = [
    ["not valid JSON", "", 0],
    ["not valid JSON", `{${ONE}`, 4],
    ["not valid JSON", `{${ONE},}`, 4],
    ["not valid JSON", `\ufeff{${ONE}}`, 4],
    ["not valid JSON", `{${ONE}}\0\0`, 4],
    ["something follows the JSON value", `{${ONE}}{}`, 4],
    ["lone surrogate", '{"\\ud800":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 4],
    ["control character", '{"a\nb":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 4],
    ["not UTF-8", Uint8Array.of(0x7b, 0x22, 0xff, 0x22, 0x7d), 0],
    ["nesting deeper than 128", "[".repeat(100_000), 0],
    ["not a JSON object but []", "[]", 0],
    ["not a JSON object but null", "null", 0],
    ["the entry is 7, not an object", '{"x":7}', 0],
    ["has shape 0 times", '{"x":{"dtype":"I8","data_offsets":[0,4]}}', 4],
    ["has dtype 2 times", '{"x":{"dtype":"I8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 4],
    ['dtype is "F42"', entry('"F42"', "[4]", "[0,4]"), 4],
    ['dtype is "toString"', entry('"toString"', "[4]", "[0,4]"), 4], // what a plain object would answer to
    ["dtype is 3", entry("3", "[4]", "[0,4]"), 4],
    ["shape is 4", entry('"I8"', "4", "[0,4]"), 4],
    ['shape is ["-4"]', entry('"I8"', "[-4]", "[0,4]"), 4],
    ['shape is ["4.0"]', entry('"I8"', "[4.0]", "[0,4]"), 4],
    ['shape is ["4e0"]', entry('"I8"', "[4e0]", "[0,4]"), 4],
    ['shape is ["9007199254740992"]', entry('"I8"', "[9007199254740992]", "[0,4]"), 4],
    ["not valid JSON", entry('"I8"', "[04]", "[0,4]"), 4],
    ['data_offsets is ["-0",4]', entry('"I8"', "[4]", "[-0,4]"), 4],
    ["data_offsets is [4]", entry('"I8"', "[4]", "[4]"), 4],
    ["data_offsets is [0,2,4]", entry('"I8"', "[4]", "[0,2,4]"), 4],
    ["data_offsets ends at 0, before its begin 4", entry('"I8"', "[4]", "[4,0]"), 4],
    ["takes 16 bytes, and data_offsets spans 4", entry('"F32"', "[4]", "[0,4]"), 4],
    ["has more than 2^53 - 1 bits", entry('"I8"', "[4294967296,4294967296]", "[0,4]"), 4],
    ["has more than 2^53 - 1 bits", entry('"I64"', "[9007199254740991]", "[0,4]"), 4],
    ["ends 4 bits into a byte", entry('"F4"', "[3]", "[0,1]"), 1],
    ["3 bytes belong to no tensor", entry('"I8"', "[4]", "[3,7]"), 7],
    ["2 bytes belong to two", `{${ONE},"y":{"dtype":"I8","shape":[4],"data_offsets":[2,6]}}`, 6],
    [/has \d+ bytes, and its tensors end at byte \d+/, `{${ONE}}`, 5], // a byte too many
    [/has \d+ bytes, and its tensors end at byte \d+/, `{${ONE}}`, 3], // cut short
    ["the name is given twice", `{${ONE},${ONE}}`, 4],
    ["the name is given twice", `{${ONE},"\\u0078":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}`, 4],
    ["has __metadata__ twice", `{"__metadata__":{},"__metadata__":{},${ONE}}`, 4],
    ["where only text may stand", `{"__metadata__":{"a":1},${ONE}}`, 4],
    ["has a __metadata__ that is []", `{"__metadata__":[],${ONE}}`, 4],
  ];
  test.each(cases)("%s", (problem, header, data) => {
    const error = refusal(fileWithHeader(header, zeros(data)));
    expect(error.message).toMatch(problem instanceof RegExp ? problem : literal(problem));
    expect(error.message).toContain("model.safetensors");
  });

  test("the file is shorter than the length field", () => {
    expect(refusal(zeros(7)).message).toContain("is 7 bytes long");
  });

  test("the header is longer than the file", () => {
    const file = fileWithHeader(`{${ONE}}`, zeros(4));
    expect(refusal(file.subarray(0, 30)).message).toContain("and the file has 30");
  });

  test.each([100_000_001n, 2n ** 64n - 1n])("the header says it has %d bytes", (length) => {
    const file = zeros(16);
    new DataView(file.buffer).setBigUint64(0, length, true);
    expect(refusal(file).message).toContain(`${length} bytes, and the format allows 100000000`);
  });
});

test("a broken tensor is named with its file, its value and the bound", () => {
  const file = fileWithHeader('{"h.0.w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,12]}}', zeros(12));
  expect(refusal(file).message).toBe(
    'model.safetensors: tensor "h.0.w": F32 of shape [2,2] takes 16 bytes, and data_offsets spans 12',
  );
});

function refusal(file: Uint8Array): UserError {
  try {
    parse(file);
  } catch (error) {
    if (error instanceof UserError && error.code === "bad_model") return error;
    throw error;
  }
  throw new Error("the header was accepted");
}

const literal = (text: string) => new RegExp(text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
