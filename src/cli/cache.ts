import { formatBytes, sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { RangeStore, type StoreEntry } from "../hub/range-store.ts";
import { rangeStoreDir } from "../hub/settings.ts";
import { defineCommand } from "./command.ts";
import { wholeNumber } from "./flags.ts";
import { openResults } from "./stdout.ts";
import { seeHelp } from "./strict.ts";

const DAY_MS = 86_400_000;
const DAYS = 30;

/** `meshnet cache`: what nodes fetched in parts. Whole files are in Hugging Face's cache, which has tools of its own. */
export const cache = defineCommand({
  name: "cache",
  description: "List or delete the parts of models that nodes have fetched",
  args: {
    action: { type: "positional", required: true, description: "list, or prune: delete what was not used lately" },
    "older-than": {
      type: "string",
      valueHint: "DAYS",
      description: `Prune what is unused for so long (default: ${DAYS})`,
    },
    all: { type: "boolean", default: false, description: "Prune everything that no running node uses" },
    "cache-dir": { type: "string", valueHint: "DIR", description: "The --cache-dir that the nodes were given" },
  },
  examples: ["meshnet cache list", "meshnet cache prune --older-than 7"],
  async run(args) {
    const store = new RangeStore(rangeStoreDir(process.env, args["cache-dir"]));
    const days = args.all ? 0 : (wholeNumber("older-than", args["older-than"], 0) ?? DAYS);
    switch (args.action) {
      case "list":
        await openResults()(table(store.list()));
        return 0;
      case "prune": {
        const print = openResults();
        await print(prune(store, Date.now() - days * DAY_MS));
        return 0;
      }
      default:
        throw new UserError("bad_usage", `meshnet cache cannot ${args.action}: list or prune`, seeHelp("cache"));
    }
  },
});

function table(entries: readonly StoreEntry[]): string {
  if (entries.length === 0) return "nothing was fetched in parts";
  const rows = entries
    .toSorted((a, b) => b.diskBytes - a.diskBytes)
    .map(({ modelId, file, diskBytes, size, usedAt, isInUse }) => [
      `${formatBytes(diskBytes)} of ${formatBytes(size)}`,
      isInUse ? "in use" : usedAt.slice(0, 10),
      `${modelId} ${file}`,
    ]);
  const total = `${formatBytes(sum(entries.map(({ diskBytes }) => diskBytes)))} in ${files(entries.length)}`;
  return columns([["ON DISK", "LAST USE", "FILE"], ...rows])
    .concat("", total)
    .join("\n");
}

function prune(store: RangeStore, before: number): string {
  const old = store.list().filter(({ usedAt }) => !(Date.parse(usedAt) > before));
  store.sweep();
  const [removed, kept] = [[] as StoreEntry[], [] as StoreEntry[]];
  for (const entry of old) (store.remove(entry.hash) ? removed : kept).push(entry);
  const lines = [`deleted ${formatBytes(sum(removed.map(({ diskBytes }) => diskBytes)))} in ${files(removed.length)}`];
  if (kept.length > 0) lines.push(`kept ${kept.map(({ modelId, file }) => `${modelId} ${file}`).join(", ")}: in use`);
  return lines.join("\n");
}

function columns(rows: readonly string[][]): string[] {
  const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => row[column]!.length)));
  return rows.map((row) =>
    row
      .map((cell, column) => cell.padEnd(widths[column]!))
      .join("  ")
      .trimEnd(),
  );
}

const files = (count: number): string => (count === 1 ? "1 file" : `${count} files`);
