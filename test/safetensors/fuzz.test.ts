import { afterAll, describe, expect, test } from "bun:test";
import { readdirSync, rmSync, writeFileSync } from "node:fs";
import { join, resolve, sep } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { INDEX_FILE, neededFiles, openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { parseHeader } from "../../src/safetensors/header.ts";
import { RangeReader } from "../../src/safetensors/range-reader.ts";
import { plainTable } from "../reference/safetensors.ts";
import { Mutator } from "../support/mutations.ts";
import { safetensorsFile, temporaryFolder } from "../support/safetensors.ts";

const ROUNDS = process.env.LONG_TESTS ? 100_000 : 5_000;
const MIB = 2 ** 20;
/** What the process may grow by: much of it is garbage of the tests themselves. */
const MOST_GROWTH = 256 * MIB;

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** Rules that the plain reader, which is as lenient as JSON.parse, does not know. */
const STRICTER =
  /given twice|__metadata__ twice|\d times, and must|whole numbers|more than 2\^53|nesting deeper|surrogate|more values than/;

describe(`of ${ROUNDS} damaged SafeTensors headers and files each gives a correct table or a refusal,`, () => {
  test("the headers changed in their structure", () => {
    const mutator = new Mutator(20261129);
    const seen = fuzz((round) => check(round, mutator.structured()));
    expect(seen.accepted).toBeGreaterThan(ROUNDS / 20); // some edits harm nothing: the table is checked as well
    expect(seen.refused).toBeGreaterThan(ROUNDS / 4);
  }, 600_000);

  test("the headers changed byte by byte", () => {
    const mutator = new Mutator(3);
    const seen = fuzz((round) => check(round, mutator.raw(mutator.structured())));
    expect(seen.accepted).toBeGreaterThan(ROUNDS / 100);
    expect(seen.refused).toBeGreaterThan(ROUNDS / 4);
  }, 600_000);

  test("the files, opened from disk and read to their last byte", () => {
    const mutator = new Mutator(5);
    const path = join(folder.path, "model.safetensors");
    using open = { reader: new RangeReader(), [Symbol.dispose]: () => open.reader[Symbol.dispose]() };
    const seen = fuzz((round) => {
      const valid = mutator.structured();
      const file = mutator.chance(0.3) ? valid : mutator.raw(valid);
      writeFileSync(path, file);
      return outcome(round, () => {
        const { tensors } = openCheckpoint(folder.path);
        expectTable(tensors, file);
        for (const tensor of tensors.values()) {
          const bytes = new Uint8Array(tensor.end - tensor.begin);
          open.reader.read(tensor.file, tensor.begin, bytes);
          if (!Buffer.from(bytes).equals(file.subarray(tensor.begin, tensor.end))) throw new Error("other bytes");
        }
      });
    });
    expect(seen.accepted).toBeGreaterThan(ROUNDS / 100);
    expect(seen.refused).toBeGreaterThan(ROUNDS / 4);
    rmSync(path);
  }, 600_000);
});

test(`of ${ROUNDS} damaged indexes each names only files inside the checkpoint, and its own tensors, or is refused`, () => {
  const shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
  const tensor = { dtype: "U8", shape: [1], data: Uint8Array.of(1) };
  writeFileSync(join(folder.path, shards[0]!), safetensorsFile({ a: tensor, b: tensor }));
  writeFileSync(join(folder.path, shards[1]!), safetensorsFile({ c: tensor }));
  const valid = { metadata: { total_size: 3 }, weight_map: { a: shards[0]!, b: shards[0]!, c: shards[1]! } };
  const mutator = new Mutator(7);
  const seen = fuzz((round) => {
    const text = new TextEncoder().encode(hostileIndex(mutator, valid, shards));
    const bytes = mutator.chance(0.5) ? text : mutator.raw(text);
    writeFileSync(join(folder.path, INDEX_FILE), bytes);
    return outcome(round, () => {
      for (const name of neededFiles(folder.path)) {
        if (!resolve(folder.path, name).startsWith(folder.path + sep)) throw new Error(`${name} is outside`);
      }
      const { tensors } = openCheckpoint(folder.path);
      const { weight_map: map } = JSON.parse(new TextDecoder().decode(bytes));
      if (Object.keys(map).length !== tensors.size) throw new Error(`${tensors.size} tensors, not those of the index`);
      for (const [name, { file }] of tensors) {
        const inShard = (valid.weight_map as Record<string, string>)[name];
        if (file.name !== inShard || map[name] !== inShard) throw new Error(`${name} in ${file.name}`);
      }
    });
  });
  expect(seen.accepted).toBeGreaterThan(ROUNDS / 100);
  expect(seen.refused).toBeGreaterThan(ROUNDS / 4);
  expect(readdirSync(folder.path).length).toBe(3);
}, 600_000);

interface Seen {
  accepted: number;
  refused: number;
}

/** Runs the rounds; what they hold on to and what they build at once must stay small. */
function fuzz(round: (index: number) => "accepted" | "refused"): Seen {
  const seen = { accepted: 0, refused: 0 };
  Bun.gc(true);
  const before = process.memoryUsage.rss();
  for (let index = 0; index < ROUNDS; index++) {
    seen[round(index)]++;
    if (index % 1000 === 0) expect(process.memoryUsage.rss() - before).toBeLessThan(MOST_GROWTH);
  }
  return seen;
}

function check(round: number, file: Uint8Array): "accepted" | "refused" {
  return outcome(
    round,
    () => expectTable(parseHeader(file, file.length, "model.safetensors"), file),
    (refusal) => {
      if (STRICTER.test(refusal.message) || !plainTable(file) || hasRepeatedKey(file)) return;
      throw new Error(`refused, and nothing is wrong with it: ${refusal.message}`);
    },
  );
}

function outcome(
  round: number,
  work: () => void,
  onRefusal: (refusal: UserError) => void = () => {},
): "accepted" | "refused" {
  try {
    work();
    return "accepted";
  } catch (error) {
    if (!(error instanceof UserError && error.code === "bad_model"))
      throw new Error(`round ${round}`, { cause: error });
    onRefusal(error);
    return "refused";
  }
}

/** By hand and not by `expect`, which takes longer than everything else here. */
function expectTable(
  table: ReadonlyMap<string, { dtype: string; shape: readonly number[]; begin: number; end: number }>,
  file: Uint8Array,
): void {
  const plain = plainTable(file);
  if (!plain) throw new Error("accepted, and it breaks a rule");
  if (plain.size !== table.size) throw new Error(`${table.size} tensors, and there are ${plain.size}`);
  for (const [name, entry] of plain) {
    const { dtype, shape, begin, end } = table.get(name) ?? {};
    if (dtype === entry.dtype && `${shape}` === `${entry.shape}` && begin === entry.begin && end === entry.end)
      continue;
    throw new Error(`${name} is another`);
  }
}

/** Whether the header's text has more keys than what JSON.parse makes of it. */
function hasRepeatedKey(file: Uint8Array): boolean {
  const text = new TextDecoder().decode(
    file.subarray(8, 8 + new DataView(file.buffer, file.byteOffset).getUint32(0, true)),
  );
  const keysIn = (value: unknown): number =>
    typeof value !== "object" || value === null
      ? 0
      : Object.values(value).reduce(
          (sum, child) => sum + keysIn(child),
          Array.isArray(value) ? 0 : Object.keys(value).length,
        );
  return [...text.matchAll(/"(?:[^"\\]|\\.)*"\s*:/g)].length !== keysIn(JSON.parse(text));
}

const HOSTILE_PATHS = [
  ..."../model.safetensors /etc/passwd .. . a/../../b %2e%2e/x %252e%252e%252fx a\\b c:x file:///etc/passwd".split(" "),
  ..."a\0b a%00b a//b ./a 100% ~/x model.safetensors \u202e".split(" "),
  "",
  "x".repeat(5000),
];

function hostileIndex(mutator: Mutator, valid: { weight_map: Record<string, string> }, shards: string[]): string {
  const map = Object.entries(valid.weight_map).map(([name, shard]) => [JSON.stringify(name), JSON.stringify(shard)]);
  for (let edits = mutator.below(3); edits > 0; edits--) {
    const member = mutator.pick(map);
    switch (mutator.below(6)) {
      case 0:
        member[1] = JSON.stringify(mutator.pick(HOSTILE_PATHS));
        break;
      case 1:
        member[1] = JSON.stringify(mutator.pick(shards));
        break;
      case 2:
        map.push([...member]);
        break;
      case 3:
        member[1] = mutator.pick(["1", "null", "[]", "{}", `["${shards[0]}"]`, "tru", "[".repeat(500)]);
        break;
      case 4:
        member[0] = JSON.stringify(mutator.pick(["__proto__", "d", "", "é", "a\u0000"]));
        break;
      default:
        map.splice(mutator.below(map.length), map.length > 1 ? 1 : 0);
    }
  }
  const weights = `{${map.map((pair) => pair.join(":")).join(",")}}`;
  const members = [
    `"metadata":${mutator.pick(["{}", '{"total_size":3}', "null", "[1.5]"])}`,
    `"weight_map":${weights}`,
  ];
  if (mutator.chance(0.05)) members.push(`"weight_map":${weights}`);
  if (mutator.chance(0.05)) members.pop();
  return `{${members.join(",")}}`;
}
