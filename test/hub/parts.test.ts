import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import {
  closeSync,
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  readSync,
  realpathSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { join, relative } from "node:path";
import { createLogger, silentLogger } from "../../src/base/log.ts";
import type { DownloadSize } from "../../src/hub/progress.ts";
import type { ByteRange } from "../../src/hub/ranges.ts";
import { type ModelSource, resolveModel, type Snapshot } from "../../src/hub/snapshot.ts";
import { COMMIT, type FakeHub, fakeHub, sha256 } from "../support/fake-hub.ts";
import { seededRandom, type TemporaryFolder, temporaryFolder } from "../support/safetensors.ts";

const MODEL = "org/model";
const NAME = "model.safetensors";
const random = seededRandom(2);
const WEIGHTS = Uint8Array.from({ length: 400_000 }, () => random() * 256);
/** Small enough that a few hundred kilobytes are many ranges. */
const TRANSFER = { rangeBytes: 50_000, gapBytes: 1000, inFlight: 4 };

let hub: FakeHub;
let folder: TemporaryFolder;

beforeEach(() => {
  folder = temporaryFolder();
  hub = fakeHub({ [MODEL]: { files: { "config.json": "{}", [NAME]: WEIGHTS } } });
});
afterEach(() => {
  hub[Symbol.dispose]();
  folder[Symbol.dispose]();
});

const source = (more: Partial<ModelSource> = {}): ModelSource => ({
  modelId: MODEL,
  env: { HOME: folder.path, HF_ENDPOINT: hub.url },
  log: silentLogger,
  retryPauseMs: 1,
  transfer: TRANSFER,
  ...more,
});
const storeFolder = () => join(folder.path, ".cache/meshnet/ranges");
const blobs = () => join(folder.path, ".cache/huggingface/hub/models--org--model/blobs");

const range = (begin: number, end: number): ByteRange => ({ begin, end });
const part = (...ranges: ByteRange[]) => [{ name: NAME, ranges }];
const ALL = part(range(0, WEIGHTS.length));

/** A start of a node, as far as the weights. */
async function start(wanted = ALL, more: Partial<ModelSource> = {}): Promise<Snapshot> {
  const snapshot = await resolveModel(source(more));
  await snapshot.ensure(wanted);
  return snapshot;
}

function expectBytes(snapshot: Snapshot, wanted = ALL): void {
  for (const { name, ranges } of wanted) {
    const file = openSync(snapshot.pathOf(name), "r");
    for (const { begin, end } of ranges) {
      const bytes = new Uint8Array(end - begin);
      expect(readSync(file, bytes, 0, bytes.length, begin)).toBe(bytes.length);
      expect(Bun.hash(bytes)).toBe(Bun.hash(WEIGHTS.subarray(begin, end)));
    }
    closeSync(file);
  }
}

const failure = (promise: Promise<unknown>) =>
  promise.then(
    () => undefined,
    (error) => error,
  );

describe("parts of a file", () => {
  test("are all that is fetched, each to its own place in our own store", async () => {
    const wanted = part(range(10_000, 20_000), range(200_000, 300_000));
    const snapshot = await start(wanted);
    expectBytes(snapshot, wanted);
    expect(hub.servedBytes()).toBe(110_000);
    expect(snapshot.pathOf(NAME)).toBe(join(storeFolder(), sha256(WEIGHTS), "data"));
    expect(statSync(snapshot.pathOf(NAME)).size).toBe(WEIGHTS.length);
    expect(existsSync(blobs())).toBe(false); // where other tools would take it for the whole file
  });

  test("come in several requests at a time, none larger than said, and small gaps come along", async () => {
    await start(part(range(0, 100_000), range(100_900, 120_000), range(121_000, 130_000)));
    expect(hub.served.map(({ begin, end }) => [begin, end]).toSorted(([a], [b]) => a! - b!)).toEqual([
      [0, 50_000],
      [50_000, 100_000],
      [100_000, 120_000],
      [121_000, 130_000],
    ]);
  });

  test("are fetched once: what other layers fetched before is not fetched again", async () => {
    await start(part(range(0, 50_000), range(100_000, 150_000)));
    const snapshot = await start(part(range(20_000, 120_000)));
    expectBytes(snapshot, part(range(0, 150_000)));
    expect(hub.servedBytes()).toBe(150_000);
  });

  test("are told before they are fetched: what is missing, and what would be fetched for it", async () => {
    await start(part(range(0, 50_000)));
    const snapshot = await resolveModel(source());
    const wanted = part(range(40_000, 60_000), range(60_500, 70_000), range(300_000, 300_100));
    expect(snapshot.missingBytes(wanted)).toEqual({ wanted: 19_600, fetch: 20_100 });
    await snapshot.ensure(wanted);
    expect(snapshot.missingBytes(wanted)).toEqual({ wanted: 0, fetch: 0 });
    expect(hub.servedBytes()).toBe(70_100);
  });

  test("of several files are fetched together", async () => {
    hub.repositories[MODEL]!.files["other.safetensors"] = WEIGHTS.toReversed();
    const snapshot = await resolveModel(source());
    await snapshot.ensure([...part(range(5, 100_000)), { name: "other.safetensors", ranges: [range(7, 9)] }]);
    expect(hub.servedBytes("other.safetensors")).toBe(2);
    expect(hub.servedBytes()).toBe(99_997);
  });

  test("that are empty need no request", async () => {
    await start(part(range(7, 7)));
    expect(hub.served).toEqual([]);
  });

  test("of a local directory are there", async () => {
    writeFileSync(join(folder.path, NAME), WEIGHTS);
    const snapshot = await start(ALL, { modelId: folder.path });
    expect(snapshot.pathOf(NAME)).toBe(join(folder.path, NAME));
    expect(snapshot.missingBytes(ALL)).toEqual({ wanted: 0, fetch: 0 });
  });

  test("go below --cache-dir, where that is given", async () => {
    const cacheDir = join(folder.path, "elsewhere");
    const snapshot = await start(ALL, { cacheDir });
    expect(snapshot.pathOf(NAME)).toBe(join(cacheDir, ".meshnet/ranges", sha256(WEIGHTS), "data"));
    expectBytes(snapshot);
  });

  test("are reported as they come", async () => {
    const told: (DownloadSize | number | string)[] = [];
    const progress = {
      begin: (size: DownloadSize) => told.push(size),
      advance: (bytes: number) => told.push(bytes),
      end: () => told.push("end"),
      fail: () => told.push("fail"),
    };
    const snapshot = await resolveModel(source());
    await snapshot.ensure(part(range(0, 1000)), { progress, checkpointBytes: 400_000 });
    await snapshot.ensure(part(range(0, 1000)), { progress, checkpointBytes: 400_000 }); // nothing to tell
    expect(told).toEqual([{ modelId: MODEL, fetchBytes: 1000, checkpointBytes: 400_000 }, 1000, "end"]);
  });
});

describe("a file that is whole in the cache of other tools", () => {
  const python = async () => {
    const snapshot = await resolveModel(source());
    await snapshot.fetch([NAME]);
    hub.served.length = hub.requests.length = 0;
  };

  test("is read there, and nothing is fetched", async () => {
    await python();
    const snapshot = await start();
    expectBytes(snapshot);
    expect(snapshot.pathOf(NAME)).toBe(join(snapshot.directory, NAME));
    expect(hub.served).toEqual([]);
    expect(existsSync(storeFolder())).toBe(false);
  });

  test("is found behind the links that Xet's shared blobs make", async () => {
    await python();
    const blob = join(blobs(), sha256(WEIGHTS));
    const shared = join(folder.path, ".cache/huggingface/hub/blobs/ab", "ab".repeat(32));
    mkdirSync(join(shared, ".."), { recursive: true });
    renameSync(blob, shared);
    symlinkSync(relative(blobs(), shared), blob);
    const snapshot = await start();
    expectBytes(snapshot);
    expect(realpathSync(snapshot.pathOf(NAME))).toBe(shared);
    expect(hub.served).toEqual([]);
  });

  test("is used at another commit too", async () => {
    await python();
    hub.repositories[MODEL]!.commit = "b".repeat(40);
    const snapshot = await start();
    expect(readlinkSync(snapshot.pathOf(NAME))).toBe(`../../blobs/${sha256(WEIGHTS)}`);
    expect(hub.served).toEqual([]);
  });

  test("is not there while it has the name .incomplete or another size", async () => {
    await python();
    const blob = join(blobs(), sha256(WEIGHTS));
    renameSync(blob, `${blob}.incomplete`);
    expectBytes(await start());
    expect(hub.servedBytes()).toBe(400_000);
    rmSync(storeFolder(), { recursive: true });
    writeFileSync(blob, WEIGHTS.subarray(0, 1000));
    expectBytes(await start());
    expect(hub.servedBytes()).toBe(800_000);
  });
});

describe("the second start", () => {
  test.each([
    ["offline by flag", { offline: true }],
    ["while the Hub is away", {}],
  ])("%s needs no network", async (_, more: { offline?: boolean }) => {
    await start();
    if (more.offline) hub.requests.length = 0;
    else hub[Symbol.dispose]();
    const snapshot = await start(ALL, more);
    expectBytes(snapshot);
    if (more.offline) expect(hub.requests).toEqual([]);
  });

  test("offline with other layers says how many bytes are not there", async () => {
    await start(part(range(0, 100_000)));
    const error = await failure(start(part(range(50_000, 151_200)), { offline: true }));
    expect(error).toMatchObject({
      code: "download",
      message: `50.0 KiB of ${NAME} of ${MODEL}@${COMMIT} are not in the cache, and this node is offline`,
      hint: "run once without --offline",
    });
  });
});

describe("an answer that is not exactly what was asked for is refused:", () => {
  test.each([
    ["the whole file", { ignoresRanges: true }, "the server ignores Range", "--whole-files"],
    [
      "another range",
      { contentHeaders: { "content-range": "bytes 1-50000/400000" } },
      '"bytes 1-50000/400000" of model.safetensors, where "bytes 0-49999/400000" was asked for',
      "proxy",
    ],
    ["no range", { contentHeaders: { "content-range": "" } }, '"no Content-Range" of', "proxy"],
    [
      "a part of a file of another size",
      { contentHeaders: { "content-range": "bytes 0-49999/400001" } },
      "it was 400000 bytes long, and is 400001 bytes long",
      "run it again",
    ],
    ["encoded bytes", { contentHeaders: { "content-encoding": "x-bz" } }, "as x-bz, which was not asked for", "proxy"],
    ["another file", { linkHeaders: { "x-linked-etag": '"bad"' } }, `it was ${sha256(WEIGHTS)}, and is bad`, "mirror"],
    ["a file of another size", { linkHeaders: { "x-linked-size": "5" } }, "400000 bytes long, and is 5", "mirror"],
    ["a file of another commit", { linkHeaders: { "x-repo-commit": "b".repeat(40) } }, "is at commit bbbb", "mirror"],
    ["more bytes", { surplus: true }, "broke off", "check the network"],
  ])("%s", async (_, behaviour, message, hint) => {
    hub.behaviour = behaviour;
    const error = await failure(start());
    expect(error).toMatchObject({
      code: "download",
      message: expect.stringMatching(message),
      hint: expect.stringContaining(hint),
    });
    hub.behaviour = {};
    expectBytes(await start());
  });

  test("fewer bytes are asked for again where they ended", async () => {
    hub.behaviour = { cutAfter: 20_000 };
    expectBytes(await start());
    expect(hub.servedBytes()).toBeWithin(400_000, 500_000); // a cut may take with it what was on the way
    expect(Math.max(...hub.served.map(({ begin, end }) => end - begin))).toBe(50_000);
  });

  test.each([
    ["directly", {}],
    ["from another host", { redirects: true }],
  ])(
    "a file that changes on the server meanwhile, which serves it %s, is dropped and fetched anew",
    async (_, more) => {
      hub.behaviour = { ...more, changesAfter: 3 };
      const error = await failure(start());
      expect(error).toMatchObject({
        code: "download",
        message: expect.stringMatching(
          /^model.safetensors of org\/model changed while it was fetched: it was etag on .*, and is changed$/,
        ),
        hint: expect.stringContaining("run it again"),
      });
      const before = hub.servedBytes();
      expectBytes(await start());
      expect(hub.servedBytes() - before).toBe(400_000);
    },
  );

  test("a file that changed between two starts is noticed as well", async () => {
    await start(part(range(0, 100_000)));
    hub.behaviour = { changesAfter: 0 };
    expect(await failure(start())).toMatchObject({ message: expect.stringContaining("and is changed") });
    expectBytes(await start());
  });

  test("a branch that moves meanwhile changes nothing: the commit is asked for", async () => {
    const snapshot = await resolveModel(source());
    const fetching = snapshot.ensure(ALL);
    hub.repositories[MODEL]!.commit = "b".repeat(40);
    const error = await failure(fetching);
    hub.repositories[MODEL]!.commit = COMMIT;
    await snapshot.ensure(ALL);
    expectBytes(snapshot);
    expect(error === undefined || error.code === "download").toBe(true);
    for (const request of hub.requests.filter((line) => line.includes("/resolve/"))) expect(request).toContain(COMMIT);
  });
});

describe("a Hub that leads to another host", () => {
  test("is not asked again for each range, and that host sees no token", async () => {
    hub.behaviour = { redirects: true };
    expectBytes(await start(ALL, { env: { ...source().env, HF_TOKEN: "secret" } }));
    const asked = hub.requests.filter((request) => request.includes("/resolve/")).length;
    expect(asked).toBeWithin(1, TRANSFER.inFlight + 1); // those that began together
    expect(new Set(hub.contentTokens)).toEqual(new Set([null]));
  });

  test("is asked again when an address has expired", async () => {
    hub.behaviour = { redirects: true, expiresAfter: 3 };
    expectBytes(await start());
    expect(hub.servedBytes()).toBe(400_000);
  });
});

describe("a Hub that is busy", () => {
  test.each([429, 500, 502, 503])("with HTTP %d for a moment is asked again", async (busyStatus) => {
    hub.behaviour = { busy: 3, busyStatus };
    expectBytes(await start());
  });

  test.each([
    ["Retry-After in seconds", () => ({ "retry-after": "1" })],
    ["Retry-After as a date", () => ({ "retry-after": new Date(Date.now() + 1900).toUTCString() })],
    ["the Hub's RateLimit", () => ({ ratelimit: '"resolvers";r=0;t=1' })],
  ])("is left alone as long as it asks by %s", async (_, headers) => {
    const lines: string[] = [];
    const log = createLogger({ level: "warn", format: "text", write: (line) => lines.push(line) });
    const snapshot = await resolveModel(source({ log }));
    hub.behaviour = { busy: 1, busyStatus: 429, busyHeaders: headers() };
    const began = performance.now();
    await snapshot.ensure(part(range(0, 10)));
    expect(performance.now() - began).toBeGreaterThan(850);
    expect(lines.join("\n")).toMatch(/HTTP 429: busy.*retryInSeconds=[01]\.\d/);
  });

  test("for too long is given up, with the file's name", async () => {
    const snapshot = await resolveModel(source());
    hub.behaviour = { busy: 1000, busyStatus: 429 };
    expect(await failure(snapshot.ensure(ALL))).toMatchObject({
      code: "download",
      message: `${NAME} of ${MODEL} broke off: ${hub.url} answers HTTP 429: busy`,
      hint: "wait some minutes, or set HF_TOKEN",
    });
    expect(1000 - hub.behaviour.busy!).toBeLessThanOrEqual(20);
  });

  test("that asks to come back tomorrow is not waited for", async () => {
    const snapshot = await resolveModel(source());
    hub.behaviour = { busy: 1000, busyStatus: 429, busyHeaders: { "retry-after": "86400" } };
    expect(await failure(snapshot.ensure(ALL))).toMatchObject({
      message: expect.stringContaining("asks to wait 1440 minutes"),
    });
  });
});

describe("a bad connection", () => {
  test("that falls silent is taken up where it fell silent", async () => {
    hub.behaviour = { cutAfter: 30_000, stalls: true };
    expectBytes(await start(part(range(0, 90_000)), { silenceMs: 100 }), part(range(0, 90_000)));
    expect(hub.servedBytes()).toBe(90_000);
  });

  test("that never gets any further ends in an error, and what had come before is kept", async () => {
    await start(part(range(0, 100_000)));
    hub.behaviour = { cutAfter: 0 };
    const error = await failure(start());
    expect(error).toMatchObject({
      code: "download",
      message: expect.stringContaining(`${NAME} of ${MODEL} broke off`),
      hint: expect.stringContaining("what has arrived is kept"),
    });
    hub.behaviour = {};
    const before = hub.servedBytes();
    expectBytes(await start());
    expect(hub.servedBytes() - before).toBe(300_000);
  });

  test("that breaks again and again, but gets on in between, is never given up", async () => {
    hub.behaviour = { cutAfter: 5000 };
    expectBytes(await start());
    expect(hub.served.length).toBeGreaterThanOrEqual(80);
  });
});

describe("what the Hub refuses is an error that says what to do:", () => {
  test.each([
    ["a gated model without a token", undefined, /accepted its terms \(HTTP 401/, /set HF_TOKEN/],
    ["a gated model with a token that may not", "hf_wrong", /accepted its terms \(HTTP 403/, /account that HF_TOKEN/],
  ])("%s", async (_, token, message, hint) => {
    Object.assign(hub.repositories[MODEL]!, { gated: true });
    const error = await failure(start(ALL, { env: { ...source().env, HF_TOKEN: token } }));
    expect([error.code, error.message, error.hint]).toEqual([
      "download",
      expect.stringMatching(message),
      expect.stringMatching(hint),
    ]);
  });

  test("a file that the listing has and the Hub has not", async () => {
    const snapshot = await resolveModel(source());
    delete hub.repositories[MODEL]!.files[NAME];
    expect(await failure(snapshot.ensure(ALL))).toMatchObject({
      message: `${MODEL} has no file ${NAME} (HTTP 404: Entry not found)`,
    });
  });
});

describe("--whole-files", () => {
  const large = Uint8Array.from({ length: 5_000_000 }, (_, i) => (i * 2654435761) >>> 13);
  beforeEach(() => {
    hub.repositories[MODEL]!.files[NAME] = large;
  });
  const whole = async (more: Partial<ModelSource> = {}) => {
    const snapshot = await resolveModel(source({ transfer: { rangeBytes: 1_000_000 }, ...more }));
    await snapshot.fetch([NAME]);
    return snapshot;
  };

  test("end up in the cache that all tools share, and only there", async () => {
    const snapshot = await whole();
    expect(readlinkSync(join(snapshot.directory, NAME))).toBe(`../../blobs/${sha256(large)}`);
    expect(Bun.hash(readFileSync(snapshot.pathOf(NAME)))).toBe(Bun.hash(large));
    expect(readdirSync(blobs())).toEqual([sha256(large)]);
    expect(readdirSync(storeFolder())).toEqual([]);
    expect(hub.served.length).toBe(5);
  });

  test("go on from the parts that are there", async () => {
    await start(part(range(0, 3_000_000)), { transfer: { rangeBytes: 1_000_000 } });
    await whole();
    expect(hub.servedBytes()).toBe(5_000_000);
  });

  test("come also from a server that ignores ranges", async () => {
    hub.behaviour = { ignoresRanges: true };
    const snapshot = await whole();
    expect(Bun.hash(readFileSync(snapshot.pathOf(NAME)))).toBe(Bun.hash(large));
  });

  test("with other content than is listed are refused, and nothing of them is believed", async () => {
    hub.behaviour = { corrupt: true };
    expect(await failure(whole())).toMatchObject({ message: expect.stringContaining("arrived with other content") });
    expect(existsSync(join(blobs(), sha256(large)))).toBe(false);
    hub.behaviour = {};
    const snapshot = await whole();
    expect(Bun.hash(readFileSync(snapshot.pathOf(NAME)))).toBe(Bun.hash(large));
  });

  test("are copies instead of links, where HF_HUB_DISABLE_SYMLINKS says so", async () => {
    const snapshot = await whole({ env: { ...source().env, HF_HUB_DISABLE_SYMLINKS: "1" } });
    expect(() => readlinkSync(snapshot.pathOf(NAME))).toThrow();
    expect(statSync(snapshot.pathOf(NAME)).size).toBe(large.length);
  });
});
