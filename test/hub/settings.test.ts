import { expect, test } from "bun:test";
import { hubSettings, meshnetCacheDir, rangeStoreDir } from "../../src/hub/settings.ts";

const HOME = "/home/somebody";

test.each([
  [{}, `${HOME}/.cache/huggingface/hub`],
  [{ XDG_CACHE_HOME: "/x" }, "/x/huggingface/hub"],
  [{ XDG_CACHE_HOME: "/x", HF_HOME: "/h" }, "/h/hub"],
  [{ HF_HOME: "/h", HUGGINGFACE_HUB_CACHE: "/old" }, "/old"],
  [{ HUGGINGFACE_HUB_CACHE: "/old", HF_HUB_CACHE: "/c" }, "/c"],
  [{ HF_HUB_CACHE: "~/c" }, `${HOME}/c`],
  [{ HF_HUB_CACHE: "$DATA/c/${DATA}", DATA: "/d" }, "/d/c//d"],
  [{ HF_HUB_CACHE: "" }, `${HOME}/.cache/huggingface/hub`], // empty is as good as unset
])("with %j the cache is where Python's is", (env, cacheDir) => {
  expect(hubSettings({ HOME, ...env }).cacheDir).toBe(cacheDir);
});

test.each([
  ["1", true],
  ["on", true],
  ["TRUE", true],
  ["Yes", true],
  ["0", false],
  ["", false],
  [undefined, false],
])("HF_HUB_OFFLINE=%p", (value, offline) => {
  expect(hubSettings({ HOME, HF_HUB_OFFLINE: value }).offline).toBe(offline);
  expect(hubSettings({ HOME, TRANSFORMERS_OFFLINE: value }).offline).toBe(offline);
});

test("the endpoint loses its last slash", () => {
  expect(hubSettings({ HOME, HF_ENDPOINT: "http://mirror:8080/" }).endpoint).toBe("http://mirror:8080");
});

test("HF_TOKEN comes before its older name", () => {
  expect(hubSettings({ HOME, HUGGING_FACE_HUB_TOKEN: "old" }).token).toBe("old");
  expect(hubSettings({ HOME, HUGGING_FACE_HUB_TOKEN: "old", HF_TOKEN: " new\n" }).token).toBe("new");
  expect(hubSettings({ HOME }).token).toBeUndefined();
});

test("HF_HUB_DISABLE_SYMLINKS, and the deadlines in seconds", () => {
  expect(hubSettings({ HOME })).toMatchObject({ symlinks: true, answerMs: undefined, silenceMs: undefined });
  const env = { HOME, HF_HUB_DISABLE_SYMLINKS: "1", HF_HUB_ETAG_TIMEOUT: "5", HF_HUB_DOWNLOAD_TIMEOUT: "2.5" };
  expect(hubSettings(env)).toMatchObject({ symlinks: false, answerMs: 5000, silenceMs: 2500 });
  expect(hubSettings({ HOME, HF_HUB_DOWNLOAD_TIMEOUT: "soon" }).silenceMs).toBeUndefined();
});

test("parts of files are below a cache that was named, else in this program's own", () => {
  expect(rangeStoreDir({ HOME })).toBe(`${HOME}/.cache/meshnet/ranges`);
  expect(rangeStoreDir({ HOME }, "/models")).toBe("/models/.meshnet/ranges");
});

test("this program's own cache is beside the others", () => {
  expect(meshnetCacheDir({ HOME })).toBe(`${HOME}/.cache/meshnet`);
  expect(meshnetCacheDir({ HOME, XDG_CACHE_HOME: "/x" })).toBe("/x/meshnet");
});
