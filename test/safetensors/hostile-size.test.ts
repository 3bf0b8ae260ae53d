import { afterAll, describe, expect, test } from "bun:test";
import { closeSync, ftruncateSync, mkdirSync, openSync, writeFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { INDEX_FILE } from "../../src/safetensors/checkpoint.ts";
import type { HostileMeasurement } from "../support/measure-hostile.ts";
import { fileWithHeader, temporaryFolder } from "../support/safetensors.ts";

/** The longest header that the format allows, or a hundredth of it. */
const LENGTH = process.env.LONG_TESTS ? 100_000_000 : 1_000_000;
const MB = 1e6;
/** The header's bytes, its text and copies of it, a million tensors (the most there may be), and a Bun. */
const MOST_BYTES = 8 * LENGTH + 150 * MB;

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());
let count = 0;

const filled = (start: string, repeated: string, end: string): string =>
  start + repeated.repeat(Math.floor((LENGTH - start.length - end.length) / repeated.length)) + end;
const numbered = (start: string, member: (index: number) => string, end: string): string => {
  const members: string[] = [];
  for (let length = start.length, index = 0; length < LENGTH - 200; index++) {
    members.push(member(index));
    length += members.at(-1)!.length + 1;
  }
  return start + members.join(",") + end;
};

describe(`a header of ${LENGTH / MB} MB takes a bounded amount of memory`, () => {
  const cases: [what: string, header: () => string][] = [
    ["that is one list after another", () => filled("", "[", "")],
    ["with a shape of ones", () => filled('{"x":{"dtype":"U8","data_offsets":[0,1],"shape":[', "1,", "1]}}")],
    ["with a shape of lists", () => filled('{"x":{"dtype":"U8","data_offsets":[0,1],"shape":[', "[[]],", "1]}}")],
    [
      "with an unknown field of lists",
      () => filled('{"x":{"dtype":"U8","shape":[],"data_offsets":[0,0],"z":[', "[],", "1]}}"),
    ],
    ["with one long name", () => filled('{"', "x", '":0}')],
    ["with one long escaped name", () => filled('{"', "\\u0041", '":0}')],
    ["with one long dtype", () => filled('{"x":{"dtype":"', "x", '"}}')],
    ["with a long number", () => filled('{"x":{"shape":[', "9", "]}}")],
    ["with metadata of many keys", () => filled('{"__metadata__":{', '"a":"b",', '"a":"b"}}')],
    ["with many tensors", () => numbered("{", (i) => `"${i}":["U8",[0],[0,0]]`, "}")],
    ["of spaces", () => filled("{", " ", "}")],
    ["of zeros", () => filled("", "\0", "")],
  ];
  test.each(cases)(
    "%s",
    async (_, header) => {
      const measured = await openHostile((path) =>
        writeFileSync(join(path, "model.safetensors"), fileWithHeader(header())),
      );
      expect(measured.peakBytes).toBeLessThan(MOST_BYTES);
      expect(measured.outcome).toSatisfy((outcome) => outcome === 0 || `${outcome}`.startsWith("model.safetensors"));
      expect(`${measured.outcome}`.length).toBeLessThan(1000); // however long what is wrong is
    },
    60_000,
  );
});

test("a file that promises more than it has is refused before anything of that size is reserved", async () => {
  const header = '{"x":{"dtype":"U8","shape":[9007199254740000],"data_offsets":[0,9007199254740000]}}';
  const measured = await openHostile((path) =>
    writeFileSync(join(path, "model.safetensors"), fileWithHeader(header, new Uint8Array(100))),
  );
  expect(measured.outcome).toMatch(/its tensors end at byte|more than 2\^53/);
  expect(measured.peakBytes).toBeLessThan(150 * MB);
});

test("an index of 10 GB is refused unread", async () => {
  const measured = await openHostile((path) => {
    const file = openSync(join(path, INDEX_FILE), "w");
    writeSync(file, '{"weight_map":{');
    ftruncateSync(file, 10e9);
    closeSync(file);
  });
  expect(measured.outcome).toBe(`${INDEX_FILE} has 10000000000 bytes, and meshnet reads up to 100000000`);
  expect(measured.peakBytes).toBeLessThan(150 * MB);
});

test(`an index of ${LENGTH / MB} MB takes a bounded amount of memory`, async () => {
  const measured = await openHostile((path) =>
    writeFileSync(
      join(path, INDEX_FILE),
      numbered('{"weight_map":{', (i) => `"${i}":"${i}"`, "}}"),
    ),
  );
  expect(measured.peakBytes).toBeLessThan(MOST_BYTES);
}, 60_000);

async function openHostile(write: (path: string) => void): Promise<HostileMeasurement> {
  const path = join(folder.path, `${count++}`);
  mkdirSync(path);
  write(path);
  const script = join(import.meta.dir, "../support/measure-hostile.ts");
  const child = Bun.spawn([process.execPath, script, path], { stdio: ["ignore", "pipe", "inherit"] });
  const output = await new Response(child.stdout).text();
  expect(await child.exited).toBe(0);
  const { outcome, ...measured } = JSON.parse(output);
  if (process.env.LONG_TESTS) console.log(measured, `${outcome}`.slice(0, 200));
  return { outcome, ...measured };
}
