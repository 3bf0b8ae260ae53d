import { UserError } from "../base/errors.ts";
import { cut } from "../base/quote.ts";
import { checkSizes, rowProblem } from "./check.ts";
import { CONTAINER_TYPE } from "./container.ts";
import { checkContentDigest } from "./digest.ts";
import { readContainer } from "./frame.ts";
import { malformed } from "./headers.ts";
import type { Draft, ForwardRequest, ForwardRow, Message, NodeFacts } from "./message.ts";
import { RAW_TYPE, readRaw } from "./raw.ts";
import { checkRowFields } from "./rows.ts";
import { readJson, readText } from "./text.ts";

/**
 * Reads a `POST /forward` in any of its spellings.
 *
 * Throws UserError: `malformed`, `corrupt`, `version_mismatch`, `unsupported_spelling`, `from_layer`, `model_mismatch`,
 * and the ones for calls that are well-formed and impossible (`hidden_size`, `token_id`, `right_padding`, …). A
 * container's row that is impossible by itself (`context_exceeded`, `token_id`, `non_finite`) has that as its `problem`.
 */
export function parseForward(message: Message, node: NodeFacts): ForwardRequest {
  try {
    return parse(message, node);
  } catch (cause) {
    // Of JSON that is nested too deeply.
    if (cause instanceof RangeError) throw malformed("the call is nested too deeply", "send flat lists", { cause });
    throw cause;
  }
}

function parse(message: Message, node: NodeFacts): ForwardRequest {
  const read = readerOf(message.headers);
  checkContentDigest(message.headers, message.body);
  const draft = read(message, node);

  const want = checkRowFields(draft.fields);
  checkSizes(draft, node);
  const rows = rowsOf(draft, node);
  const { spelling, call, payload, rectangle, tokenIds } = draft;
  return { ...call, spelling, payload, rows, rectangle, want, ...(tokenIds && { tokenIds }) };
}

/**
 * The rows that take part. What is wrong with one of them is that row's problem where the call is rows, as nodes send
 * them: they come from different callers. A rectangle is one caller's, and wrong as a whole.
 */
function rowsOf(draft: Draft, node: NodeFacts): ForwardRow[] {
  const rows: ForwardRow[] = [];
  let at = 0;
  draft.lengths.forEach((tokens, index) => {
    const { n: _, positionStart = 0, want = "token", ...fields } = draft.fields[index] ?? {};
    const problem = rowProblem(draft, node, index, at);
    if (problem && draft.rectangle) throw problem;
    if (tokens > 0) rows.push({ ...fields, index, tokens, positionStart, want, ...(problem && { problem }) });
    at += tokens;
  });
  return rows;
}

function readerOf(headers: Headers): (message: Message, node: NodeFacts) => Draft {
  const [type = "", ...parameters] = (headers.get("Content-Type") ?? "")
    .split(";")
    .map((part) => part.trim().toLowerCase());
  const charset = parameters
    .find((part) => part.startsWith("charset="))
    ?.slice("charset=".length)
    .replaceAll('"', "");
  switch (type) {
    case "text/plain":
    case "application/json":
      if (charset === undefined || charset === "utf-8" || charset === "utf8")
        return type === "text/plain" ? readText : readJson;
      throw new UserError(
        "unsupported_spelling",
        `the text is in ${cut(charset)}, and this node reads utf-8`,
        "send it as utf-8",
      );
    case RAW_TYPE:
      return readRaw;
    case CONTAINER_TYPE:
      return readContainer;
    default:
      throw new UserError(
        "unsupported_spelling",
        type === "" ? "the call has no content-type" : `the content-type is ${cut(type)}`,
        "send text/plain or application/json (text), application/octet-stream (hidden states) or application/x-safetensors",
      );
  }
}
