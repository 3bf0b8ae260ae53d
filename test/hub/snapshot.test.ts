import { afterEach, beforeEach, describe, expect, spyOn, test } from "bun:test";
import {
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { createLogger, silentLogger } from "../../src/base/log.ts";
import { type ModelSource, resolveModel, smallFiles } from "../../src/hub/snapshot.ts";
import { COMMIT, type FakeHub, fakeHub, gitSha1, sha256 } from "../support/fake-hub.ts";
import { seededRandom, type TemporaryFolder, temporaryFolder } from "../support/safetensors.ts";

const MODEL = "some-org/some.model";
const random = seededRandom(1);
const WEIGHTS = Uint8Array.from({ length: 300_000 }, () => random() * 256);
const CONFIG = '{"model_type":"gpt2"}';

let hub: FakeHub;
let folder: TemporaryFolder;

beforeEach(() => {
  folder = temporaryFolder();
  hub = fakeHub({
    [MODEL]: { files: { "config.json": CONFIG, "model.safetensors": WEIGHTS, "docs/README.md": "", "logo.png": "x" } },
  });
});
afterEach(() => {
  hub[Symbol.dispose]();
  folder[Symbol.dispose]();
});

const cacheDir = () => join(folder.path, "hub");
const modelFolder = () => join(cacheDir(), "models--some-org--some.model");
const source = (more: Partial<ModelSource> = {}): ModelSource => ({
  modelId: MODEL,
  env: { HOME: folder.path, HF_ENDPOINT: hub.url, HF_HUB_CACHE: cacheDir() },
  log: silentLogger,
  retryPauseMs: 1,
  ...more,
});

describe("a model on the Hub", () => {
  test("is listed before anything of it is fetched", async () => {
    const snapshot = await resolveModel(source());
    expect(snapshot.revision).toBe(COMMIT);
    expect(snapshot.files).toContainEqual({ name: "model.safetensors", size: 300_000, sha256: sha256(WEIGHTS) });
    expect(smallFiles(snapshot)).toEqual(["config.json"]);
    expect(hub.requests.filter((request) => request.includes("/resolve/"))).toEqual([]);
  });

  test("is fetched file by file into the cache that all tools share", async () => {
    const snapshot = await resolveModel(source());
    await snapshot.fetch(["config.json", "docs/README.md", "model.safetensors"]);
    expect(readFileSync(join(snapshot.directory, "model.safetensors"))).toEqual(Buffer.from(WEIGHTS));
    expect(readFileSync(join(modelFolder(), "refs/main"), "utf8")).toBe(COMMIT);
    expect(snapshot.directory).toBe(join(modelFolder(), "snapshots", COMMIT));
    expect(readlinkSync(join(snapshot.directory, "model.safetensors"))).toBe(`../../blobs/${sha256(WEIGHTS)}`);
    expect(readlinkSync(join(snapshot.directory, "docs/README.md"))).toBe(
      `../../../blobs/${gitSha1(new Uint8Array())}`,
    );
    expect(readFileSync(join(snapshot.directory, "config.json"), "utf8")).toBe(CONFIG);
    expect(existsSync(join(snapshot.directory, "logo.png"))).toBe(false);
    expect(readdirSync(join(modelFolder(), "blobs")).filter((name) => name.endsWith(".incomplete"))).toEqual([]);
  });

  test("is asked for by its commit everywhere, whatever the branch does meanwhile", async () => {
    const snapshot = await resolveModel(source({ revision: "main" }));
    await snapshot.fetch(["config.json"]);
    const [revision, ...others] = hub.requests;
    expect(revision).toBe(`GET /api/models/${MODEL}/revision/main`);
    for (const request of others) expect(request).toContain(COMMIT);
  });

  test.each(["v1.0", "refs/pr/7", "refs/convert/safetensors"])(
    "is found at the revision %s, also offline",
    async (revision) => {
      hub.repositories[MODEL]!.refs = [revision];
      await (await resolveModel(source({ revision }))).fetch(["config.json"]);
      expect(readFileSync(join(modelFolder(), "refs", revision), "utf8")).toBe(COMMIT);
      expect((await resolveModel(source({ revision, offline: true }))).revision).toBe(COMMIT);
    },
  );

  test("is not fetched twice", async () => {
    await (await resolveModel(source())).fetch(["model.safetensors"]);
    hub.requests.length = 0;
    await (await resolveModel(source({ revision: COMMIT }))).fetch(["model.safetensors"]);
    expect(hub.requests).toEqual([]);
  });

  test("shares unchanged files with its next commit", async () => {
    await (await resolveModel(source())).fetch(["model.safetensors"]);
    hub.repositories[MODEL]!.commit = "b".repeat(40);
    hub.requests.length = 0;
    const next = await resolveModel(source());
    await next.fetch(["model.safetensors"]);
    expect(readFileSync(join(next.directory, "model.safetensors"))).toEqual(Buffer.from(WEIGHTS));
    expect(hub.requests.filter((request) => request.includes("/resolve/"))).toEqual([]);
  });

  test("is fetched by several at once without harm", async () => {
    const snapshots = await Promise.all([1, 2, 3].map(() => resolveModel(source())));
    await Promise.all(snapshots.map((snapshot) => snapshot.fetch(["model.safetensors"])));
    expect(readFileSync(join(snapshots[0]!.directory, "model.safetensors"))).toEqual(Buffer.from(WEIGHTS));
  });

  test("goes where --cache-dir says", async () => {
    const elsewhere = join(folder.path, "elsewhere");
    const snapshot = await resolveModel(source({ cacheDir: elsewhere }));
    expect(snapshot.directory).toStartWith(join(elsewhere, "models--some-org--some.model"));
  });

  test("says what it fetches in log lines, and nothing on stdout", async () => {
    const lines: string[] = [];
    const log = createLogger({ level: "debug", format: "text", write: (line) => lines.push(line) });
    using stdout = spyOn(process.stdout, "write");
    using debug = spyOn(console, "debug");
    await (await resolveModel(source({ log }))).fetch(["model.safetensors"]);
    expect(lines.join("\n")).toMatch(/downloaded file=model\.safetensors size="293\.0 KiB"/);
    expect(stdout).not.toHaveBeenCalled();
    expect(debug).not.toHaveBeenCalled();
  });

  test("cannot place a file outside the cache", async () => {
    hub.repositories[MODEL]!.files["../../../evil"] = "x";
    const snapshot = await resolveModel(source());
    expect(snapshot.files.map(({ name }) => name)).not.toContain("../../../evil");
    await expect(snapshot.fetch(["../../../evil"])).rejects.toMatchObject({ code: "download" });
  });
});

describe("a bad connection", () => {
  test("that breaks is taken up where it broke", async () => {
    hub.behaviour = { cutAfter: 70_000 };
    const snapshot = await resolveModel(source());
    await snapshot.fetch(["model.safetensors"]);
    expect(readFileSync(join(snapshot.directory, "model.safetensors"))).toEqual(Buffer.from(WEIGHTS));
    expect(hub.requests.filter((request) => request.includes("/resolve/")).length).toBeLessThan(8);
  });

  test("that falls silent is taken up as well", async () => {
    hub.behaviour = { cutAfter: 120_000, stalls: true };
    const snapshot = await resolveModel(source({ silenceMs: 100 }));
    await snapshot.fetch(["model.safetensors"]);
    expect(readFileSync(join(snapshot.directory, "model.safetensors"))).toEqual(Buffer.from(WEIGHTS));
  });

  test("that never gets further ends in an error, without leaving a part behind", async () => {
    hub.behaviour = { cutAfter: 0 };
    const snapshot = await resolveModel(source());
    const failure = snapshot.fetch(["model.safetensors"]);
    await expect(failure).rejects.toMatchObject({ code: "download", message: expect.stringContaining("broke off") });
    expect(readdirSync(join(modelFolder(), "blobs"))).toEqual([]);
  });

  test("to a Hub that is busy for a moment is tried again", async () => {
    hub.behaviour = { busy: 3 };
    const snapshot = await resolveModel(source());
    hub.behaviour.busy = 2;
    await snapshot.fetch(["config.json"]);
    expect(readFileSync(join(snapshot.directory, "config.json"), "utf8")).toBe(CONFIG);
  });

  test("through a proxy that ignores ranges gives the file all the same", async () => {
    hub.behaviour = { ignoresRanges: true };
    const snapshot = await resolveModel(source());
    await snapshot.fetch(["model.safetensors"]);
    expect(readFileSync(join(snapshot.directory, "model.safetensors"))).toEqual(Buffer.from(WEIGHTS));
  });

  test("that breaks, through a proxy that ignores ranges, begins anew and is an error when it goes on", async () => {
    hub.behaviour = { ignoresRanges: true, cutAfter: 100_000 };
    const snapshot = await resolveModel(source());
    await expect(snapshot.fetch(["model.safetensors"])).rejects.toThrow(
      "model.safetensors of some-org/some.model broke off",
    );
    hub.behaviour.cutAfter = undefined;
    await snapshot.fetch(["model.safetensors"]);
    expect(readFileSync(join(snapshot.directory, "model.safetensors"))).toEqual(Buffer.from(WEIGHTS));
  });

  test("that changes a file is an error, not a wrong file", async () => {
    hub.behaviour = { corrupt: true };
    const snapshot = await resolveModel(source());
    for (const name of ["model.safetensors", "config.json"]) {
      await expect(snapshot.fetch([name])).rejects.toThrow("arrived with other content");
    }
    expect(existsSync(join(snapshot.directory, "model.safetensors"))).toBe(false);
  });
});

describe("what the Hub refuses is an error that says what to do", () => {
  test.each([
    ["a model that is not there", { modelId: "some-org/other" }, /has no model some-org\/other/, /spelling/],
    ["a revision that is not there", { revision: "v9" }, /has no such revision .*Invalid rev id: v9/, /branch/],
  ])("%s", async (_, more, message, hint) => {
    await expect(resolveModel(source(more))).rejects.toMatchObject({
      code: "download",
      message: expect.stringMatching(message),
      hint: expect.stringMatching(hint),
    });
  });

  test.each([
    [
      "a private model, without a token",
      "org/private",
      undefined,
      /none that anybody without a token may see/,
      /set HF_TOKEN/,
    ],
    ["a private model, with another's token", "org/private", "hf_x", /or none that this token may see/, /may read it/],
  ])("%s", async (_, modelId, token, message, hint) => {
    const env = { ...source().env, HF_TOKEN: token };
    await expect(resolveModel(source({ modelId, env }))).rejects.toMatchObject({
      code: "download",
      message: expect.stringMatching(message),
      hint: expect.stringMatching(hint),
    });
  });

  test("a token that is none", async () => {
    hub.behaviour.knowsNoToken = true;
    await expect(resolveModel(source({ env: { ...source().env, HF_TOKEN: "hf_x" } }))).rejects.toMatchObject({
      code: "download",
      message: "the Hub does not know this token (HTTP 401: Invalid credentials in Authorization header)",
      hint: expect.stringContaining("valid token"),
    });
  });

  test("a page that no Hub sends, as of a network that wants a login", async () => {
    hub.behaviour.portal = "<html>log in</html>";
    await expect(resolveModel(source())).rejects.toMatchObject({
      code: "download",
      message: expect.stringContaining("gave an answer that is none"),
      hint: expect.stringContaining("proxy"),
    });
  });

  test.each([
    ["without a token", undefined, "set HF_TOKEN"],
    ["with one that is not allowed", "hf_wrong", "the account that HF_TOKEN belongs to"],
  ])("a gated model %s", async (_, token, hint) => {
    hub.repositories[MODEL]!.gated = true;
    hub.behaviour.token = "hf_right";
    const snapshot = await resolveModel(source({ env: { ...source().env, HF_TOKEN: token } }));
    await expect(snapshot.fetch(["config.json"])).rejects.toMatchObject({
      code: "download",
      message: expect.stringContaining("accepted its terms"),
      hint: expect.stringContaining(hint),
    });
  });

  test("a Hub that cannot be reached", async () => {
    hub[Symbol.dispose]();
    await expect(resolveModel(source())).rejects.toMatchObject({
      code: "download",
      message: expect.stringContaining("cannot be reached"),
    });
  });

  test("an address that is none", async () => {
    const env = { ...source().env, HF_ENDPOINT: "hub" };
    await expect(resolveModel(source({ env }))).rejects.toMatchObject({ code: "bad_usage" });
  });
});

describe("the token", () => {
  test.each([
    ["HF_TOKEN", () => ({ HF_TOKEN: "any-token" })],
    ["the file of a login", () => ({ HF_HOME: loggedIn("any-token\n") })],
  ])("from %s opens a gated model, whatever it looks like", async (_, env) => {
    hub.repositories[MODEL]!.gated = true;
    hub.behaviour.token = "any-token";
    const snapshot = await resolveModel(source({ env: { ...source().env, ...env() } }));
    await snapshot.fetch(["model.safetensors"]);
    expect(existsSync(join(snapshot.directory, "model.safetensors"))).toBe(true);
  });

  test("is not shown to the host that content comes from", async () => {
    hub.behaviour.redirects = true;
    const snapshot = await resolveModel(source({ env: { ...source().env, HF_TOKEN: "secret" } }));
    await snapshot.fetch(["model.safetensors"]);
    expect(hub.contentTokens.length).toBeGreaterThan(0);
    expect(new Set(hub.contentTokens)).toEqual(new Set([null]));
  });

  function loggedIn(token: string): string {
    writeFileSync(join(folder.path, "token"), token);
    return folder.path;
  }
});

describe("offline", () => {
  test.each([
    ["by the option", { offline: true }],
    ["by HF_HUB_OFFLINE", { env: { HF_HUB_OFFLINE: "YES" } }],
  ])("%s, a cached model is used without a request", async (_, { env, ...more }: Partial<ModelSource>) => {
    await (await resolveModel(source())).fetch(["config.json"]);
    hub.requests.length = 0;
    const snapshot = await resolveModel(source({ ...more, env: { ...source().env, ...env } }));
    await snapshot.fetch(["config.json"]);
    expect(snapshot.files).toHaveLength(4);
    await expect(snapshot.fetch(["model.safetensors"])).rejects.toThrow("is not in the cache");
    expect(hub.requests).toEqual([]);
  });

  test("a model that another tool cached is known by its links", async () => {
    await (await resolveModel(source())).fetch(["config.json", "model.safetensors"]);
    rmSync(join(modelFolder(), "trees"), { recursive: true });
    const { files } = await resolveModel(source({ offline: true }));
    expect(files).toEqual([
      { name: "config.json", size: CONFIG.length, sha256: undefined },
      { name: "model.safetensors", size: 300_000, sha256: sha256(WEIGHTS) },
    ]);
  });

  test("a model that is not cached is an error", async () => {
    for (const revision of ["main", COMMIT]) {
      await expect(resolveModel(source({ offline: true, revision }))).rejects.toMatchObject({
        code: "download",
        message: `${MODEL}@${revision} is not in the cache, and this node is offline`,
      });
    }
  });

  test("a Hub that cannot be reached is no reason to refuse a cached model", async () => {
    await (await resolveModel(source())).fetch(["config.json"]);
    hub[Symbol.dispose]();
    await (await resolveModel(source())).fetch(["config.json"]);
  });
});

describe("a directory", () => {
  test("is used as it is", async () => {
    writeFileSync(join(folder.path, "config.json"), CONFIG);
    mkdirSync(join(folder.path, "onnx"));
    const snapshot = await resolveModel(source({ modelId: folder.path }));
    expect(snapshot).toMatchObject({ revision: "local", directory: folder.path });
    expect(snapshot.files).toEqual([{ name: "config.json", size: CONFIG.length }]);
    await snapshot.fetch(["config.json"]);
    expect(lstatSync(join(folder.path, "config.json")).isFile()).toBe(true);
  });

  test.each(["./missing", "/missing", "missing", "a/b/c", "..", "org/.."])(
    "%p that is not there is said so",
    async (id) => {
      const modelId = id === ".." ? join(folder.path, "x", "..", "y") : id;
      await expect(resolveModel(source({ modelId }))).rejects.toMatchObject({
        code: "bad_model",
        message: `no such directory: ${modelId}`,
      });
    },
  );

  test("that is a file is said so", async () => {
    const modelId = join(folder.path, "model.gguf");
    writeFileSync(modelId, "");
    await expect(resolveModel(source({ modelId }))).rejects.toThrow("is not a directory");
  });
});
