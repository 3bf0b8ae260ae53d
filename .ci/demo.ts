// `npm run demo`: builds the binary and runs the main job: two nodes that share a small GPT-2, and a completion.
import { join } from "node:path";
import { build } from "./build.ts";

const MODEL = join(import.meta.dir, "../test/fixtures/gpt2-tiny");
const PROMPT = "This program is free";
const READY_MS = 120_000;

const meshnet = await build();
const started = performance.now();

const tail = node("tail", ["--shard-start", "2", "--shard-end", "4"]);
const head = node("head", ["--shard-start", "0", "--shard-end", "2", "--next", await tail.url]);

// A demo that is told to stop takes its nodes with it.
for (const signal of ["SIGINT", "SIGTERM"] as const) {
  process.once(signal, () => void Promise.all([head.stop(), tail.stop()]).then(() => process.exit(1)));
}
try {
  await ready(await head.url);
  console.log(`\nboth nodes ready after ${((performance.now() - started) / 1000).toFixed(1)} s\n`);
  const generate = ["generate", PROMPT, "--head", await head.url, "--max-new-tokens", "48"];
  console.log(`$ meshnet ${generate.map((word) => (word.includes(" ") ? JSON.stringify(word) : word)).join(" ")}`);
  const client = Bun.spawn([meshnet, ...generate], { stdio: ["ignore", "inherit", "inherit"] });
  process.exitCode = await client.exited;
} finally {
  await Promise.all([head.stop(), tail.stop()]);
}

/** Starts a node on a free port; its log goes to stderr with its name in front. */
function node(name: string, flags: string[]) {
  const words = ["node", "--model-id", MODEL, "--port", "0", ...flags];
  console.log(`$ meshnet ${words.join(" ")}`);
  const child = Bun.spawn([meshnet, ...words], { stdio: ["ignore", "inherit", "pipe"] });
  const url = Promise.withResolvers<string>();
  void (async () => {
    for await (const line of lines(child.stderr)) {
      console.error(`${name}  ${line}`);
      const [, found] = / listening url=(\S+)/.exec(line) ?? [];
      if (found) url.resolve(found);
    }
    url.reject(new Error(`the ${name} ended before it listened`));
  })();
  return {
    url: url.promise,
    async stop() {
      child.kill();
      await child.exited;
    },
  };
}

async function* lines(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  let rest = "";
  for await (const chunk of stream.pipeThrough(new TextDecoderStream())) {
    const parts = (rest + chunk).split("\n");
    rest = parts.pop()!;
    yield* parts;
  }
}

async function ready(url: string): Promise<void> {
  while (performance.now() - started < READY_MS) {
    if ((await fetch(`${url}health/ready`)).ok) return;
    await Bun.sleep(100);
  }
  throw new Error(`the head was not ready within ${READY_MS / 1000} s`);
}
