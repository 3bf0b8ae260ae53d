import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { parseJson } from "../base/json.ts";
import { quote } from "../base/quote.ts";
import { HEADERS, malformed, readCallFields, readHeader } from "./headers.ts";
import { checkCall, checkHead, checkRowCount } from "./check.ts";
import type { Draft, Message, NodeFacts } from "./message.ts";
import { checkPositionIds } from "./raw.ts";
import { decodeSlots, type Rectangle, rectangleFromMask, rectangleOf, strip } from "./rectangle.ts";
import { rowFieldsOfHeaders } from "./rows.ts";

/** A `text/plain` body: its bytes are the prompt, all of them. */
export function readText({ headers, body }: Message, node: NodeFacts): Draft {
  const call = readTextCall(headers, node);
  refuseMask(headers);
  return draftOf(headers, call, encodePrompts([decodeUtf8(body, true)], true, node), true, undefined);
}

/** An `application/json` body: `{"prompt": …}` or `{"input_ids": …}`. */
export function readJson({ headers, body }: Message, node: NodeFacts): Draft {
  const call = readTextCall(headers, node);
  const { prompts, inputIds, addSpecialTokens } = parseBody(body);
  if (prompts) {
    refuseMask(headers);
    checkRowCount(prompts.length, node);
    return draftOf(headers, call, encodePrompts(prompts, addSpecialTokens, node), true, undefined);
  }
  checkRowCount(inputIds.length, node);
  return draftOf(headers, call, inputIds, false, readHeader(headers, HEADERS.attentionMask));
}

function readTextCall(headers: Headers, node: NodeFacts): Draft["call"] {
  checkHead("a text call", node);
  if (headers.has(HEADERS.shape)) {
    throw malformed(
      `header ${HEADERS.shape} came with a text call`,
      "it is for application/octet-stream: leave it away",
    );
  }
  const call = readCallFields(headers);
  checkCall(call, node);
  return call;
}

/** Padding is the head's own business where it makes the tokens. */
function refuseMask(headers: Headers): void {
  if (!headers.has(HEADERS.attentionMask)) return;
  throw malformed(`header ${HEADERS.attentionMask} came with a prompt`, "leave it away: the head pads prompts itself");
}

/** `mask`: of token ids that the caller padded himself. */
function draftOf(
  headers: Headers,
  call: Draft["call"],
  ids: readonly (readonly number[])[],
  fromText: boolean,
  mask: { where: string; text: string } | undefined,
): Draft {
  const fields = rowFieldsOfHeaders(headers, ids.length);
  const rectangle = mask ? maskedRectangle(ids, mask) : rectangleOf(ids.map((row) => row.length));
  if (!mask) {
    const empty = ids.findIndex((row) => row.length === 0);
    if (empty >= 0) throw emptyRow(empty);
  }
  checkPositionIds(headers, rectangle, fields);
  const flat = Int32Array.from({ length: sum(ids.map((row) => row.length)) });
  let at = 0;
  for (const row of ids) {
    flat.set(row, at);
    at += row.length;
  }
  // Ids that were padded by the caller are a rectangle; the head's own rows are rows already.
  const payload = { kind: "ids", ids: mask ? strip(flat, rectangle, 1) : flat, fromText } as const;
  return { spelling: "text", call, payload, lengths: rectangle.lengths, fields, rectangle };
}

function maskedRectangle(ids: readonly (readonly number[])[], mask: { where: string; text: string }): Rectangle {
  const slots = ids[0]?.length ?? 0;
  const odd = ids.findIndex((row) => row.length !== slots);
  if (odd >= 0) {
    throw malformed(
      `input_ids row ${odd} has ${ids[odd]!.length} ids and row 0 has ${slots}, and ${mask.where} is for rows of one length`,
      "pad all rows to one length, or leave the mask away",
    );
  }
  return rectangleFromMask(decodeSlots(mask, ids.length, slots, 1), slots);
}

/** More than this cannot be one prompt: it is refused before a tokenizer spends minutes on it. */
const bytesAtMost = (maxContext: number): number => 65536 + 64 * maxContext;

function encodePrompts(prompts: readonly string[], addSpecialTokens: boolean, node: NodeFacts): number[][] {
  const { encode } = node;
  if (!encode) {
    throw new UserError("unsupported_spelling", "this head was started without a tokenizer", "send input_ids");
  }
  return prompts.map((prompt, row) => {
    if (prompt === "") throw emptyRow(row);
    if (prompt.length > bytesAtMost(node.maxContext)) {
      throw new UserError(
        "context_exceeded",
        `the prompt of row ${row} has ${prompt.length} characters, and this node's context is ${node.maxContext} tokens`,
        "send a shorter prompt",
        { details: { row } },
      );
    }
    const ids = encode(prompt, addSpecialTokens);
    if (ids.length === 0) throw emptyRow(row);
    return ids;
  });
}

type Body =
  | { prompts: string[]; inputIds?: undefined; addSpecialTokens: boolean }
  | { prompts?: undefined; inputIds: number[][]; addSpecialTokens: boolean };

const BODY_HINT =
  'send {"prompt": "text" or ["text", …]} or {"input_ids": [[1, 2], …]}, and "add_special_tokens" if need be';

function parseBody(bytes: Uint8Array): Body {
  const body = parseJsonObject(bytes);
  const { prompt, input_ids, add_special_tokens = true, ...unknown } = body;
  const stranger = Object.keys(unknown)[0];
  if (stranger !== undefined) throw malformed(`the JSON body has the unknown field ${quote(stranger)}`, BODY_HINT);
  if (typeof add_special_tokens !== "boolean") throw malformed("add_special_tokens is not true or false", BODY_HINT);
  if ((prompt === undefined) === (input_ids === undefined)) {
    throw malformed(
      `the JSON body has ${prompt === undefined ? "neither" : "both"} of prompt and input_ids`,
      BODY_HINT,
    );
  }
  return prompt === undefined
    ? { inputIds: parseIds(input_ids), addSpecialTokens: add_special_tokens }
    : { prompts: parsePrompts(prompt), addSpecialTokens: add_special_tokens };
}

function parsePrompts(prompt: unknown): string[] {
  const prompts: unknown[] = Array.isArray(prompt) ? prompt : [prompt];
  if (prompts.length === 0) throw noRows("prompt");
  prompts.forEach((text, row) => {
    if (typeof text !== "string") throw malformed(`the prompt of row ${row} is not text`, BODY_HINT);
    if (!text.isWellFormed())
      throw malformed(`the prompt of row ${row} has half a surrogate pair`, "send whole characters");
  });
  return prompts as string[];
}

function parseIds(rows: unknown): number[][] {
  if (!Array.isArray(rows)) throw malformed("input_ids is not a list of rows", BODY_HINT);
  if (rows.length === 0) throw noRows("input_ids");
  rows.forEach((row: unknown, index) => {
    if (!Array.isArray(row)) throw malformed(`input_ids row ${index} is not a list`, BODY_HINT);
    const slot = row.findIndex((id) => !Number.isInteger(id));
    if (slot >= 0)
      throw malformed(`input_ids row ${index} has ${quote(row[slot])} at slot ${slot}`, "token ids are whole numbers");
    // Beyond int32 they would wrap round on their way into the tensor, perhaps to a valid id.
    const wide = row.findIndex((id) => id !== (id | 0));
    if (wide < 0) return;
    throw new UserError(
      "token_id",
      `row ${index} has the token id ${quote(row[wide])} at slot ${wide}`,
      "tokenize with this model's tokenizer",
      {
        details: { row: index },
      },
    );
  });
  return rows as number[][];
}

function parseJsonObject(bytes: Uint8Array): Record<string, unknown> {
  const text = decodeUtf8(bytes, false);
  let value: unknown;
  try {
    value = parseJson(text);
  } catch (cause) {
    if (cause instanceof RangeError) throw cause; // `parseForward` says so
    throw malformed("the body is not JSON", BODY_HINT, { cause });
  }
  if (typeof value === "object" && value !== null && !Array.isArray(value)) return value as Record<string, unknown>;
  throw malformed("the JSON body is not an object", BODY_HINT);
}

function decodeUtf8(bytes: Uint8Array, keepByteOrderMark: boolean): string {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: keepByteOrderMark }).decode(bytes);
  } catch (cause) {
    throw malformed("the body is not valid UTF-8", "encode the text as UTF-8", { cause });
  }
}

const noRows = (field: string): UserError =>
  new UserError("empty_prompt", `${field} is an empty list`, "send at least one row");

function emptyRow(row: number): UserError {
  return new UserError("empty_prompt", `the prompt of row ${row} is empty`, "send at least one token", {
    details: { row },
  });
}
