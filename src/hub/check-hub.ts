import { networkMessage } from "./retry.ts";
import type { HubSettings } from "./settings.ts";

/** What a look at the Hub shows. */
export interface HubState {
  readonly endpoint: string;
  /** Why it cannot be used, or undefined. */
  readonly problem: string | undefined;
  /** What to do about it. */
  readonly remedy: string | undefined;
  /** From the question to the whole answer. */
  readonly seconds: number | undefined;
  /** The Hub's own time, in whole seconds: `ms` since 1970, and this machine's clock at the moment of the answer. */
  readonly clock: { readonly theirMs: number; readonly ourMs: number } | undefined;
  readonly token: "none" | "valid" | "refused" | "unknown";
  /** Whose token it is. */
  readonly user: string | undefined;
}

const TIMEOUT_MS = 10_000;

/** Asks the Hub for one model, and whose the token is. One try: this is to see how things are, not to get through. */
export async function checkHub(
  { endpoint, token }: Pick<HubSettings, "endpoint" | "token">,
  ask: typeof fetch = fetch,
): Promise<HubState> {
  const nothing = { endpoint, seconds: undefined, clock: undefined, user: undefined };
  const unknown = token === undefined ? "none" : "unknown";
  const get = async (path: string, headers: Record<string, string> = {}) => {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const response = await ask(`${endpoint}${path}`, { headers, signal, redirect: "manual" });
    return { status: response.status, date: response.headers.get("date"), text: await response.text() };
  };
  if (!URL.canParse(endpoint)) {
    const problem = `HF_ENDPOINT is ${JSON.stringify(endpoint)}, which is no address`;
    const remedy = "set HF_ENDPOINT to the http(s) address of a Hub, or unset it";
    return { ...nothing, problem, remedy, token: unknown };
  }
  const began = performance.now();
  try {
    const models = await get("/api/models?limit=1");
    const seconds = (performance.now() - began) / 1000;
    const theirMs = Date.parse(models.date ?? "");
    const clock = Number.isNaN(theirMs) ? undefined : { theirMs, ourMs: Date.now() };
    const seen = { ...nothing, seconds, clock };
    if (models.status !== 200 || !isList(models.text)) {
      const problem = `${endpoint} answers HTTP ${models.status}, and not as a Hub does`;
      return { ...seen, problem, remedy: "check HF_ENDPOINT, and any proxy or login page in between", token: unknown };
    }
    if (token === undefined) return { ...seen, problem: undefined, remedy: undefined, token: "none" };

    const who = await get("/api/whoami-v2", { authorization: `Bearer ${token}` });
    if (who.status === 200)
      return { ...seen, problem: undefined, remedy: undefined, token: "valid", user: nameIn(who.text) };
    if (who.status === 401 || who.status === 403) {
      const remedy = "set HF_TOKEN to a valid token, or unset it and log out (hf auth logout)";
      return { ...seen, problem: "the Hub does not know this token", remedy, token: "refused" };
    }
    const problem = `the Hub does not say whose the token is (HTTP ${who.status})`;
    return { ...seen, problem, remedy: "try again later", token: "unknown" };
  } catch (error) {
    const problem = `${endpoint} cannot be reached: ${networkMessage(error)}`;
    const remedy =
      "check the network and proxies (HTTPS_PROXY, NO_PROXY); where there is meant to be none, set HF_HUB_OFFLINE=1";
    return { ...nothing, problem, remedy, token: unknown };
  }
}

function isList(text: string): boolean {
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}

function nameIn(text: string): string | undefined {
  try {
    const name: unknown = JSON.parse(text)?.name;
    return typeof name === "string" ? name : undefined;
  } catch {
    return undefined;
  }
}
