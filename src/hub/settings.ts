import { readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { HUB_URL } from "@huggingface/hub";

export type Environment = Readonly<Record<string, string | undefined>>;

/** What the Python library reads from the environment, read alike: the two share one cache and one token. */
export interface HubSettings {
  readonly endpoint: string;
  readonly token: string | undefined;
  readonly cacheDir: string;
  readonly offline: boolean;
  /** Whether the cache may hold links. */
  readonly symlinks: boolean;
  /** For the Hub to begin its answer, where that is set. */
  readonly answerMs: number | undefined;
  /** Between two pieces of a file, where that is set. */
  readonly silenceMs: number | undefined;
}

/** The names and their order are those of huggingface_hub 1.33, `constants.py`. */
export function hubSettings(env: Environment): HubSettings {
  const hfHome = path(env, env["HF_HOME"]) ?? join(cacheHome(env), "huggingface");
  return {
    endpoint: (env["HF_ENDPOINT"] || HUB_URL).replace(/\/+$/, ""),
    token: token(env, hfHome),
    cacheDir: path(env, env["HF_HUB_CACHE"]) ?? path(env, env["HUGGINGFACE_HUB_CACHE"]) ?? join(hfHome, "hub"),
    offline: isTrue(env["HF_HUB_OFFLINE"]) || isTrue(env["TRANSFORMERS_OFFLINE"]),
    symlinks: !isTrue(env["HF_HUB_DISABLE_SYMLINKS"]),
    answerMs: milliseconds(env["HF_HUB_ETAG_TIMEOUT"]),
    silenceMs: milliseconds(env["HF_HUB_DOWNLOAD_TIMEOUT"]),
  };
}

/** Where this program keeps what it can compute again. */
export const meshnetCacheDir = (env: Environment): string => join(cacheHome(env), "meshnet");

/** Where it keeps the parts of models that it fetched: under a cache that was named, else in its own. */
export const rangeStoreDir = (env: Environment, cacheDir?: string): string =>
  cacheDir === undefined ? join(meshnetCacheDir(env), "ranges") : join(cacheDir, ".meshnet", "ranges");

const home = (env: Environment): string => env["HOME"] || homedir();
const cacheHome = (env: Environment): string => path(env, env["XDG_CACHE_HOME"]) ?? join(home(env), ".cache");

/** With `~` and `$NAME` replaced, as Python does; an empty setting is none. */
function path(env: Environment, setting: string | undefined): string | undefined {
  return (
    setting
      ?.replace(/^~(?=\/|$)/, () => home(env))
      .replace(/\$(?:(\w+)|\{(\w+)\})/g, (whole, plain, braced) => env[plain ?? braced] ?? whole) || undefined
  );
}

function token(env: Environment, hfHome: string): string | undefined {
  const given = (env["HF_TOKEN"] || env["HUGGING_FACE_HUB_TOKEN"])?.trim();
  if (given) return given;
  if (isTrue(env["HF_HUB_DISABLE_IMPLICIT_TOKEN"])) return undefined;
  try {
    return readFileSync(path(env, env["HF_TOKEN_PATH"]) ?? join(hfHome, "token"), "utf8").trim() || undefined;
  } catch {
    return undefined; // nobody logged in on this machine
  }
}

const isTrue = (setting: string | undefined): boolean => /^(1|on|yes|true)$/i.test(setting ?? "");

/** Given in seconds. */
const milliseconds = (setting: string | undefined): number | undefined =>
  Number(setting) > 0 ? Number(setting) * 1000 : undefined;
