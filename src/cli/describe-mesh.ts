import { formatBytes, sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { MeshMachine } from "../server/machines.ts";
import type { MeshPlan, MeshShare, MeshSplit, WayOut } from "../server/plan-mesh.ts";
import type { MeshCommand } from "./mesh-commands.ts";

/** The plan for people, with the sums by which it was made. */
export function describeMesh(plan: MeshPlan, commands: readonly MeshCommand[]): string {
  const { model, machines, split } = plan;
  if (!split) throw misfit(plan);
  const blocks: [title: string, lines: readonly string[]][] = [
    ["model", [`${model.id} (${model.type}, ${model.layers} layers), ${model.quantization}, ${sequences(model)}`]],
    ["machines", table(machines.map(machineCells))],
    ["split", table([SPLIT_TITLES, ...split.shares.map((share) => shareCells(share, plan))])],
    ["a token", arithmetic(split, plan)],
    ["fewer", fewer(plan, split)],
    ["assumed", assumed(plan)],
    ["problems", machines.flatMap(({ problems }, i) => problems.map((problem) => `machine ${i + 1}: ${problem}`))],
    ["warning", headWarning(plan)],
  ];
  const text = blocks
    .filter(([, lines]) => lines.length > 0)
    .flatMap(([title, lines]) => lines.map((line, i) => `${(i === 0 ? title : "").padEnd(10)}${line}`.trimEnd()));
  const start = commands.length > 1 ? "start, in any order: a node waits for its next one" : "start";
  return [...text, "", start, ...commands.flatMap((one) => describeCommand(one, plan))].join("\n");
}

function machineCells(machine: MeshMachine, i: number): string[] {
  const { bytesPerSecond, speedSource, linkSource, roundTripSeconds, linkBytesPerSecond } = machine;
  const way = `${time(roundTripSeconds)} away, ${decimal(linkBytesPerSecond)}/s (${linkSource})`;
  const speed = `${decimal(bytesPerSecond)}/s (${speedSource})`;
  return [`${i + 1}`, placeOf(machine), memoryOf(machine), `reads ${speed}`, way];
}

/** Where it is, as far as that is known. */
function placeOf({ host, port, url }: MeshMachine): string {
  if (url !== null || port === null) return url ?? host ?? "";
  return host!.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
}

function memoryOf({ memoryBytes, limitBytes }: MeshMachine): string {
  const memory = memoryBytes === null ? "unknown" : formatBytes(memoryBytes);
  return limitBytes === null ? memory : `${memory}, --memory-limit ${formatBytes(limitBytes)}`;
}

const SPLIT_TITLES = ["machine", "layers", "needs", "of", "a token reads", "", "pass", "hop"];

function shareCells({ machine, start, end, needBytes, ownBytes, readBytes, ...share }: MeshShare, plan: MeshPlan) {
  const { memoryBytes, limitBytes, bytesPerSecond } = plan.machines[machine]!;
  const [needs, of] =
    limitBytes === null
      ? [formatBytes(needBytes), formatBytes(memoryBytes!)]
      : [formatBytes(ownBytes), `${formatBytes(limitBytes)} (limit)`];
  const isHead = start === 0;
  const isTail = end === plan.model.layers;
  const role = isHead && isTail ? "whole" : isHead ? "head" : isTail ? "tail" : "";
  return [
    `${machine + 1} ${role}`,
    `${start}-${end}`,
    needs,
    of,
    `${decimal(readBytes)} ÷ ${decimal(bytesPerSecond)}/s`,
    `= ${time(share.readSeconds)}`,
    time(share.passSeconds),
    isHead ? "" : time(share.hopSeconds),
  ];
}

function arithmetic({ shares, secondsPerToken, tokensPerSecond }: MeshSplit, { hopBytes }: MeshPlan): string[] {
  const terms = shares.flatMap(({ readSeconds, passSeconds, hopSeconds }) =>
    [readSeconds, passSeconds, hopSeconds].filter((seconds) => seconds > 0),
  );
  return [
    `${terms.map((seconds) => milliseconds(seconds)).join(" + ")} = ${time(secondsPerToken)}: ${rate(tokensPerSecond)}`,
    `Σ machines (weights that a token reads ÷ speed + pass) + Σ hops (round trip + ${hopBytes} bytes ÷ link speed)`,
    "of one conversation, and without what attention reads of the cache",
  ];
}

function fewer(
  { model, machines, onAllMachines }: MeshPlan,
  { shares, secondsPerToken, tokensPerSecond }: MeshSplit,
): string[] {
  if (shares.length === machines.length) return [];
  const left = machines.keys().filter((i) => !shares.some(({ machine }) => machine === i));
  const names = [...left].map((i) => `${i + 1}`);
  const out = `without machine${names.length > 1 ? "s" : ""} ${names.join(", ")}`;
  if (machines.length > model.layers) {
    return [`${out}: the model has ${model.layers} layers, and there are ${machines.length} machines`];
  }
  if (!onAllMachines) return [`${out}: with a layer on every machine the model does not fit`];
  const slower = `with a layer on all ${machines.length} a token takes ${time(onAllMachines.secondsPerToken)} (${rate(onAllMachines.tokensPerSecond)})`;
  return [`${out} it is faster: ${time(secondsPerToken)} (${rate(tokensPerSecond)}); ${slower}`];
}

function assumed({ machines, split, anyOrder, softwareExtraBytes }: MeshPlan): string[] {
  const unasked = split!.shares.map(({ machine }) => machine).filter((i) => machines[i]!.device === null);
  const some = machines.filter(({ speedSource }) => speedSource === "assumed");
  const isLinkAssumed = split!.shares.length > 1 && machines.some(({ linkSource }) => linkSource === "assumed");
  return [
    ...(unasked.length > 0
      ? [
          `that ${describeMachines(unasked)} a GPU: a driver that computes on the CPU takes ${formatBytes(softwareExtraBytes)} more`,
        ]
      : []),
    ...(some.length > 0
      ? [
          `that memory is read at ${decimal(some[0]!.bytesPerSecond)}/s: say it as SIZE@SPEED, or let --peers measure it`,
        ]
      : []),
    ...(isLinkAssumed ? ["the way between machines: say it with --round-trip and --link-speed"] : []),
    ...(anyOrder ? [] : ["that the machines follow each other as listed: there are too many to try every order"]),
  ];
}

const headWarning = ({ headProblem }: MeshPlan): string[] =>
  headProblem === null ? [] : [`the head cannot start: ${headProblem.problem}`, headProblem.hint];

function describeMachines(places: readonly number[]): string {
  const numbers = places.toSorted((a, b) => a - b).map((i) => `${i + 1}`);
  return numbers.length > 1 ? `machines ${numbers.join(", ")} have` : `machine ${numbers[0]} has`;
}

function describeCommand({ machine, command }: MeshCommand, { machines }: MeshPlan): string[] {
  const { url } = machines[machine]!;
  const place = placeOf(machines[machine]!) || memoryOf(machines[machine]!);
  return [
    "",
    `  # on machine ${machine + 1} (${place})${url === null ? "" : ", once the node there has stopped"}`,
    `  ${command}`,
  ];
}

/** Nothing fits: both numbers, and what would help. */
export function misfit({ model, machines, wholeOnBytes, wholeOwnBytes, waysOut }: MeshPlan): UserError {
  const isLimited = machines.some(({ limitBytes }) => limitBytes !== null);
  const memory = machines.map(({ memoryBytes }) => memoryBytes ?? 0);
  const sizes = machines.map(memoryOf).join(" + ");
  const total = memory.length > 1 && !isLimited ? ` = ${formatBytes(sum(memory))}` : "";
  const [least, most] = [Math.min(...wholeOnBytes), Math.max(...wholeOnBytes)];
  const range = least === most ? "" : ` to ${formatBytes(most)}, by the driver,`;
  const own = isLimited ? ` (${formatBytes(wholeOwnBytes)} of it count for --memory-limit)` : "";
  return new UserError(
    "does_not_fit",
    `${model.id} (${model.layers} layers, ${model.quantization}, ${sequences(model)}) needs ${formatBytes(least)}${range} in one piece${own}, more in several, and there is ${sizes}${total}: no split fits`,
    ["any one of these would fit:", ...waysOut.map(describeWayOut)].join("\n    "),
    { details: { ways_out: waysOut } },
  );
}

function describeWayOut({ quantization, maxSessions, maxContext, machineBytes }: WayOut): string {
  const flags = [
    ...(quantization ? [`--quantization ${quantization}`] : []),
    ...(maxSessions ? [`--max-sessions ${maxSessions}`] : []),
    ...(maxContext ? [`--max-context ${maxContext}`] : []),
  ].join(" ");
  if (!machineBytes) return flags;
  return [...(flags ? [flags] : []), `another machine with ${formatBytes(machineBytes)} (on a GPU)`].join(" and ");
}

const sequences = ({ maxSessions, maxContext }: MeshPlan["model"]): string =>
  `${maxSessions} sequence${maxSessions === 1 ? "" : "s"} of ${maxContext} tokens`;

/** Columns as wide as their widest cell. */
function table(rows: readonly (readonly string[])[]): string[] {
  const widths = rows[0]!.map((_, column) => Math.max(...rows.map((cells) => cells[column]!.length)));
  return rows.map((cells) => cells.map((cell, column) => cell.padEnd(widths[column]!)).join("  "));
}

const UNITS = ["B", "kB", "MB", "GB", "TB"] as const;

/** `5.58 GB`: powers of ten, so that a division can be followed. */
function decimal(bytes: number): string {
  let unit = 0;
  let value = bytes;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${Number(value.toPrecision(3))} ${UNITS[unit]}`;
}

const milliseconds = (seconds: number): string => `${Number((seconds * 1000).toPrecision(3))}`;
const time = (seconds: number): string => `${milliseconds(seconds)} ms`;
const rate = (tokensPerSecond: number): string => `${Number(tokensPerSecond.toPrecision(3))} tokens/s`;
