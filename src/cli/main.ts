import { version } from "../../package.json" with { type: "json" };
import { ERRORS, type ErrorCode, UserError } from "../base/errors.ts";
import { RemoteError } from "../protocol/error-reply.ts";
import type { Command } from "./command.ts";
import { tell } from "./stderr.ts";
import { openResults } from "./stdout.ts";
import { nearestName } from "./strict.ts";

/** Loaded when called: `--help` and the client commands run where no GPU runtime can. */
const COMMANDS: Record<string, () => Promise<Command>> = {
  node: async () => (await import("./node.ts")).node,
  generate: async () => (await import("./generate.ts")).generate,
  chat: async () => (await import("./chat.ts")).chat,
  plan: async () => (await import("./plan.ts")).plan,
  doctor: async () => (await import("./doctor.ts")).doctor,
  cache: async () => (await import("./cache.ts")).cache,
  bench: async () => (await import("./bench.ts")).bench,
  verify: async () => (await import("./verify.ts")).verifyCommand,
};

/** A bug: the stack is printed with it (EX_SOFTWARE of sysexits). */
const EXIT_BUG = 70;
const EXIT_USAGE = 2;

/** The whole command line: runs it, and ends the process with its exit code. */
export async function main(words: readonly string[]): Promise<never> {
  let code: number;
  try {
    code = await dispatch(words);
  } catch (error) {
    code = report(error);
  }
  process.exit(code);
}

async function dispatch([name, ...words]: readonly string[]): Promise<number> {
  if (name === "--version" || name === "-v") return print(version);
  if (name === "--help" || name === "-h" || name === "help") return print(await overview());
  if (name === undefined) {
    tell(await overview());
    return EXIT_USAGE;
  }
  if (name === "doctor-probe") return (await import("./doctor-probe.ts")).doctorProbe(words); // the doctor's own children
  const load = Object.hasOwn(COMMANDS, name) ? COMMANDS[name] : undefined;
  if (!load) throw unknownCommand(name);
  const command = await load();
  const end = words.indexOf("--");
  const wantsHelp = words.slice(0, end < 0 ? undefined : end).some((word) => word === "--help" || word === "-h");
  return wantsHelp ? print(await command.help()) : command.run(words);
}

async function print(text: string): Promise<number> {
  await openResults()(text);
  return 0;
}

async function overview(): Promise<string> {
  const commands = await Promise.all(Object.values(COMMANDS).map((load) => load()));
  return [
    `meshnet ${version}: ordinary machines serve one language model together`,
    "",
    "  meshnet COMMAND [FLAGS]",
    "",
    ...commands.map(({ name, description }) => `  ${name.padEnd(10)} ${description}`),
    "",
    "meshnet COMMAND --help tells a command's flags. meshnet --version tells the version.",
  ].join("\n");
}

function unknownCommand(name: string): UserError {
  const nearest = nearestName(name, Object.keys(COMMANDS));
  const known = `commands are ${Object.keys(COMMANDS).join(", ")}`;
  return new UserError("bad_usage", `unknown command ${name}`, nearest ? `did you mean ${nearest}? ${known}` : known);
}

/** Says what happened on stderr and gives the exit code. */
function report(error: unknown): number {
  if (error instanceof UserError) {
    tell(`meshnet: ${error.message}\n  ${error.hint}`);
    return ERRORS[error.code].exit;
  }
  if (error instanceof RemoteError) {
    tell(`meshnet: ${error.message}\n  ${error.body.hint}`);
    return ERRORS[error.body.code as ErrorCode]?.exit ?? 1;
  }
  console.error("meshnet: a bug:", error);
  return EXIT_BUG;
}
