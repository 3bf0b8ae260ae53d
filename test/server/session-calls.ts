import { encodeContainer } from "../../src/protocol/container.ts";
import type { Sampling } from "../../src/protocol/sampling.ts";
import { post } from "./tiny-node.ts";

/** A row of token ids, for a head. */
export interface IdsRow {
  readonly session?: string;
  readonly step?: number;
  readonly at?: number;
  readonly ids: readonly number[];
  readonly want?: "token" | "none";
  readonly maxLen?: number;
  readonly prefix?: string;
  readonly sampling?: Sampling;
}

/** What a test looks at of a row: its token (null: none was wanted), or its error. */
export type RowAnswer = { readonly token: number | null; readonly logprobs?: object } | RowError;

export interface RowError {
  readonly code: string;
  readonly status: number;
  readonly cacheLen?: number;
  readonly row?: number;
  readonly node?: string;
}

export const containerOf = (rows: readonly IdsRow[], metadata: Record<string, string> = {}): Uint8Array => {
  const ids = Int32Array.from(rows.flatMap((row) => row.ids));
  const said = rows.map(({ session, step, at, ids, want, maxLen, prefix, sampling }) => {
    return { session, step, pos_start: at, n: ids.length, want, max_len: maxLen, prefix, sampling };
  });
  const tensor = { name: "input_ids", dtype: "I32", shape: [ids.length], data: ids } as const;
  return encodeContainer([tensor], { rows: JSON.stringify(said), ...metadata });
};

/** Sends rows as one call and gives each row's answer. */
export async function call(url: string, rows: readonly IdsRow[], signal?: AbortSignal): Promise<RowAnswer[]> {
  const body = containerOf(rows);
  const type = "application/x-safetensors";
  const reply = signal
    ? await fetch(new URL("forward", url), { method: "POST", body, headers: { "Content-Type": type }, signal })
    : await post(url, body, type);
  return answersOf(reply, rows.length);
}

export async function answersOf(reply: Response, rows: number): Promise<RowAnswer[]> {
  if (reply.status === 204) return Array.from({ length: rows }, () => ({ token: null }));
  const body = (await reply.json()) as Body;
  if (!reply.ok) {
    const errors = body.errors ?? [body.error];
    if (errors.length !== rows && body.errors) throw new Error(`${errors.length} errors for ${rows} rows`);
    return Array.from({ length: rows }, (_, row) => errorOf(reply.status, (errors[row] ?? errors[0])!));
  }
  return body.token_ids!.map((token, row) => {
    const error = body.errors?.[row];
    const logprobs = body.logprobs?.[row];
    return error ? errorOf(0, error) : { token, ...(logprobs && { logprobs }) };
  });
}

export const endSession = (url: string, id: string): Promise<Response> =>
  fetch(new URL(`sessions/${id}`, url), { method: "DELETE" });

interface Body {
  token_ids?: (number | null)[];
  logprobs?: (object | null)[];
  error?: ErrorFields;
  errors?: (ErrorFields | null)[];
}
type ErrorFields = { code: string; cache_len?: number; row?: number; node: string };

const errorOf = (status: number, { code, cache_len: cacheLen, row, node }: ErrorFields): RowError => ({
  code,
  status,
  node,
  ...(cacheLen !== undefined && { cacheLen }),
  ...(row !== undefined && { row }),
});
