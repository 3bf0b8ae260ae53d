// A process of its own that fetches all of a model's weights: `bun fetch-model.ts HUB HOME RANGE_BYTES`. Says on stdout
// when it begins and when it is done, and on stderr what it logs.
import { createLogger } from "../../src/base/log.ts";
import { resolveModel } from "../../src/hub/snapshot.ts";

const [hub, home, rangeBytes] = process.argv.slice(2) as [string, string, string];
const log = createLogger({ level: "info", format: "text", write: (line) => console.error(line) });
const env = { HOME: home, HF_ENDPOINT: hub };
const snapshot = await resolveModel({ modelId: "org/model", env, log, transfer: { rangeBytes: Number(rangeBytes) } });
const weights = snapshot.files.filter(({ name }) => name.endsWith(".safetensors"));
const began = Promise.withResolvers<void>();
const progress = { begin() {}, advance: () => began.resolve(), end() {}, fail() {} };
void began.promise.then(() => console.log("began"));
const parts = weights.map(({ name, size }) => ({ name, ranges: [{ begin: 0, end: size }] }));
await snapshot.ensure(parts, { progress, checkpointBytes: 0 });
console.log(snapshot.pathOf("model.safetensors"));
process.exit(0);
