import { formatBytes } from "../../base/bytes.ts";
import { inDigits } from "../../base/digits.ts";
import { type PeerReport, probePeer } from "../../mesh/probe.ts";
import { RemoteError } from "../../protocol/error-reply.ts";
import { PROTOCOL_VERSION } from "../../protocol/headers.ts";
import type { Finding } from "./check.ts";

/** Another node, from here: reachable, version, model, round trip, throughput. Throws as `probePeer` does. */
export async function peer(url: string): Promise<Finding> {
  let report: PeerReport;
  try {
    report = await probePeer(url);
  } catch (error) {
    if (error instanceof RemoteError) return refusedBy(url, error);
    throw error;
  }
  const { info, notReady, roundTripSeconds, uploadBytesPerSecond, tokenSeconds, problems } = report;
  const rates = [
    `${inDigits(roundTripSeconds * 1000, 2)} ms to it and back`,
    uploadBytesPerSecond === null ? "throughput not measured" : `${formatBytes(uploadBytesPerSecond)}/s towards it`,
    tokenSeconds === null ? "speed not measured" : `${inDigits(tokenSeconds * 1000, 2)} ms for a token in its layers`,
  ];
  const details = [
    `model: ${info.model_id}, layers ${info.start}-${info.end} of ${info.layers}, ${info.quantization}`,
    `protocol version ${info.v}, device: ${info.device}`,
    `next node: ${info.next ?? "none"}`,
    ...problems,
  ];
  const facts = { ...report, info: { ...info } };
  const found = `${report.url}: ${rates.join(", ")}`;
  if (info.v !== PROTOCOL_VERSION) {
    return {
      status: "fail",
      found: `${report.url} speaks protocol version ${info.v}, and this meshnet ${PROTOCOL_VERSION}`,
      details,
      remedy: "run the same version of meshnet on both",
      facts,
    };
  }
  if (notReady !== null) {
    const remedy = "look at its log, and at the node after it";
    return { status: "fail", found: `${report.url} is not ready: ${notReady}`, details, remedy, facts };
  }
  if (problems.length > 0) {
    return { status: "warn", found, details, remedy: "look at its log", facts };
  }
  return { status: "ok", found, details, facts };
}

/** It is a node, and it does not say what it is. A URL with more in it than the node's own is `probePeer`'s to name. */
function refusedBy(url: string, { status, body, message }: RemoteError): Finding {
  const facts = { url, status, code: body.code };
  const remedy =
    body.code === "forbidden_host"
      ? "start that node with --allow-host and the name by which it is called here"
      : "look at its log, and whether it is of this version";
  return { status: "fail", found: `${url} refuses to be asked: ${message}`, remedy, facts };
}
