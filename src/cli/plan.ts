import type { ArgsDef } from "citty";
import { UserError } from "../base/errors.ts";
import { ASSUMED, describeMachines, type MachineSpec } from "../server/machines.ts";
import { planMesh } from "../server/plan-mesh.ts";
import { DEFAULT_SESSIONS, MAX_ROWS, type Quantization, QUANTIZATIONS } from "../server/plan-node.ts";
import { defineCommand } from "./command.ts";
import { describeMesh, misfit } from "./describe-mesh.ts";
import { hostAndPort, isLocalhost, LOOPBACK } from "./host.ts";
import { hubFlags, logFlags, loggerOf, wholeNumber, wordList } from "./flags.ts";
import { meshCommands } from "./mesh-commands.ts";
import { openResults } from "./stdout.ts";
import { byteRate, byteSize } from "./units.ts";

const flags = {
  "model-id": {
    type: "string",
    required: true,
    valueHint: "ID|DIR",
    description: "A model on the Hugging Face Hub (openai-community/gpt2), or a directory that holds one",
  },
  nodes: {
    type: "string",
    valueHint: "[HOST[:PORT]=]SIZE[@SPEED],…",
    description: "The free memory of each machine's GPU, and the speed of that memory: 8GiB,gpu-box=24GiB@900GB/s",
  },
  peers: {
    type: "string",
    valueHint: "URL[=SIZE[@SPEED]],…",
    description: "Machines on which a node runs: each is asked for its memory and measured",
  },
  quantization: {
    type: "enum",
    options: [...QUANTIZATIONS],
    description: "How the layers' weights are held (default: as the checkpoint has them)",
  },
  "int8-activations": { type: "boolean", default: false, description: "With int8 weights: exact LLM.int8()" },
  "max-context": { type: "string", valueHint: "T", description: "The longest sequence, in tokens (as for a node)" },
  "max-sessions": {
    type: "string",
    default: String(DEFAULT_SESSIONS),
    valueHint: "N",
    description: "Sequences of that length to keep room for",
  },
  "round-trip": {
    type: "string",
    valueHint: "MS",
    description: `Between two machines, in milliseconds, where it is not measured (default: ${ASSUMED.roundTripSeconds * 1000})`,
  },
  "link-speed": {
    type: "string",
    valueHint: "SPEED",
    description: "Between two machines, where it is not measured (default: 1Gbit/s)",
  },
  ...hubFlags,
  json: { type: "boolean", default: false, description: "Print the result as JSON (docs/plan.md)" },
  ...logFlags,
} satisfies ArgsDef;

/** `meshnet plan`: which layers go where, how fast that will be, and the commands that start it. */
export const plan = defineCommand({
  name: "plan",
  description: "Say which layers of a model go on which machine",
  args: flags,
  examples: [
    "meshnet plan --model-id openai-community/gpt2-xl --nodes 8GiB,24GiB@900GB/s",
    "meshnet plan --model-id openai-community/gpt2-xl --peers http://192.168.1.20:8000,http://192.168.1.21:8000 --quantization nf4",
  ],
  async run(args) {
    const specs = [...wordList(args.peers).map(peerSpec), ...wordList(args.nodes).map(nodeSpec)];
    if (specs.length === 0) {
      const hint = "give --nodes with the memory of each, as 8GiB,24GiB, or --peers with the URLs of running nodes";
      throw new UserError("bad_usage", "meshnet plan needs machines", hint);
    }
    checkPorts(specs);
    const config = {
      modelId: args["model-id"],
      revision: args.revision,
      quantization: args.quantization as Quantization | undefined,
      int8Activations: args["int8-activations"],
      maxContext: wholeNumber("max-context", args["max-context"], 1),
      maxSessions: wholeNumber("max-sessions", args["max-sessions"], 1, MAX_ROWS),
      offline: args.offline,
      cacheDir: args["cache-dir"],
    };
    const roundTrip = args["round-trip"];
    const linkSpeed = args["link-speed"];
    const print = openResults();
    const machines = await describeMachines(specs, {
      ...ASSUMED,
      ...(roundTrip !== undefined && { roundTripSeconds: milliseconds("--round-trip", roundTrip) / 1000 }),
      ...(linkSpeed !== undefined && { linkBytesPerSecond: byteRate("--link-speed", linkSpeed) }),
      linkSource: roundTrip === undefined && linkSpeed === undefined ? "assumed" : "given",
    });
    const result = await planMesh(config, machines, { log: loggerOf(args), env: process.env });
    const commands = meshCommands(result, config);
    if (args.json) await print(JSON.stringify({ ...result, commands }, undefined, 2));
    if (!result.split) throw misfit(result);
    if (!args.json) await print(describeMesh(result, commands));
    return 0;
  },
});

/** `24GiB`, `gpu-box=24GiB@900GB/s`, `10.0.0.1:8000=24GiB`. */
function nodeSpec(text: string): MachineSpec {
  const at = text.lastIndexOf("=");
  if (at < 0) return sizeAndSpeed("--nodes", text, text);
  return { ...hostAndPort("--nodes", text.slice(0, at)), ...sizeAndSpeed("--nodes", text.slice(at + 1), text) };
}

/** `http://192.168.1.20:8000`, with what the node shall not be asked behind it: `=24GiB@900GB/s`. */
function peerSpec(text: string): MachineSpec {
  const at = text.lastIndexOf("=");
  return at < 0 ? { url: text } : { url: text.slice(0, at), ...sizeAndSpeed("--peers", text.slice(at + 1), text) };
}

function sizeAndSpeed(flag: string, text: string, whole: string): MachineSpec {
  const [size = "", speed, ...rest] = text.split("@");
  if (rest.length > 0) throw new UserError("bad_usage", `${flag} ${text} has two speeds`, "give one, as 24GiB@900GB/s");
  if (size.trim() === "")
    throw new UserError("bad_usage", `${flag} ${whole} has no size`, "give one, as gpu-box=24GiB");
  if (/^\d+$/.test(size) && Number(size) > 0) {
    throw new UserError("bad_usage", `${flag} ${size} has no unit`, `give it with one, as ${size}GiB`);
  }
  const memoryBytes = byteSize(flag, size);
  return speed === undefined ? { memoryBytes } : { memoryBytes, bytesPerSecond: byteRate(flag, speed) };
}

/** Two nodes cannot listen on one port. */
function checkPorts(specs: readonly MachineSpec[]): void {
  const seen = new Map<string, string>();
  for (const spec of specs) {
    const place = placeOf(spec);
    if (!place) continue;
    const key = `${isLocalhost(place.hostname) ? LOOPBACK : place.hostname} ${place.port || "80"}`;
    const other = seen.get(key);
    if (other === undefined) seen.set(key, place.host);
    else {
      const problem = other === place.host ? `${other} is given twice` : `${other} and ${place.host} are one place`;
      const hint = "name each machine once; for two nodes on one machine give two ports";
      throw new UserError("bad_usage", problem, hint);
    }
  }
}

function placeOf({ host, port, url }: MachineSpec): URL | null {
  if (url !== undefined) return URL.parse(url);
  return port === undefined ? null : new URL(`http://${host!.includes(":") ? `[${host}]` : host}:${port}`);
}

function milliseconds(flag: string, text: string): number {
  const value = /^\d+(\.\d+)?$/.test(text) ? Number(text) : NaN;
  if (Number.isFinite(value)) return value;
  throw new UserError("bad_usage", `${flag} ${text} is not a number of milliseconds`, "give it as 0.5");
}
