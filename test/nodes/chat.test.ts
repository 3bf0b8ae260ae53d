import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { type Chain, MESHNET, run, spawn, startChain, untilFree } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { writeEndlessModel } from "../support/scripted-model.ts";

/** gpt2-tiny has no chat template: this one is as plain as can be. */
const TEMPLATE =
  "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());
const chatty = join(folder.path, "chatty");
cpSync(TINY, chatty, { recursive: true });
writeFileSync(join(chatty, "chat_template.jinja"), TEMPLATE);
const endless = join(folder.path, "endless");
writeEndlessModel(endless, "on and on, ");

let chain: Chain;
beforeAll(async () => {
  chain = await startChain(chatty, [2, 4]);
}, 60_000);
afterAll(() => chain[Symbol.asyncDispose]());

const chat = (lines: string[], ...words: string[]) =>
  run(["chat", "--head", chain.head, "--max-new-tokens", "12", ...words], { stdin: new Blob([lines.join("\n")]) });

type Turn = { role: string; content: string };

/** What the API says to the same conversation. */
async function answerTo(messages: Turn[]): Promise<string> {
  const reply = await fetch(`${chain.head}v1/chat/completions`, {
    method: "POST",
    body: JSON.stringify({ messages, temperature: 0, max_tokens: 12 }),
  });
  const { choices } = (await reply.json()) as { choices: { message: { content: string } }[] };
  return choices[0]!.message.content;
}

const user = (content: string): Turn => ({ role: "user", content });

describe("with lines from stdin", () => {
  test("each is answered with the whole conversation before it, and nothing but answers is on stdout", async () => {
    const [first, second] = ["This program is free", "You may copy it"];
    const answer = await answerTo([user(first)]);
    const next = await answerTo([user(first), { role: "assistant", content: answer }, user(second)]);
    const { code, stdout, stderr } = await chat([first, "", second]);
    expect({ code, stdout }).toEqual({ code: 0, stdout: `${answer}\n${next}\n` });
    expect(stderr).toMatch(/^(12 tokens, the first after .*\n){2}$/);
  }, 30_000);

  test("--json gives a line for each, and what was said before is in the cache", async () => {
    const long = "The licence says that you may copy it ".repeat(4).trim();
    const { code, stdout, stderr } = await chat([long, "Go on"], "--json", "--quiet");
    expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
    const [first, second] = stdout
      .trimEnd()
      .split("\n")
      .map((line) => JSON.parse(line));
    expect(first).toEqual({
      model: chatty,
      message: long,
      text: await answerTo([user(long)]),
      finish_reason: "length",
      usage: expect.any(Object),
      timing: expect.any(Object),
    });
    expect(second.message).toBe("Go on");
    expect(second.usage.cached_tokens).toBeGreaterThan(31); // whole pages of 32 tokens
  }, 30_000);

  test("--system and the commands decide what is sent", async () => {
    const system = (content: string): Turn => ({ role: "system", content });
    const expected = [
      await answerTo([system("Be brief"), user("Why?")]),
      await answerTo([system("Be kind"), user("Why?")]),
      await answerTo([user("/why?")]),
    ];
    const lines = ["Why?", "/reset", "/system Be kind", "Why?", "/system", "/reset", "//why?", "/exit", "never"];
    const { code, stdout } = await chat(lines, "--system", "Be brief");
    expect({ code, stdout }).toEqual({ code: 0, stdout: expected.map((text) => `${text}\n`).join("") });
  }, 30_000);

  test("an unknown command ends it with 2, and a conversation that is too long with 1", async () => {
    const unknown = await chat(["/restart"]);
    expect({ code: unknown.code, stderr: unknown.stderr }).toEqual({
      code: 2,
      stderr: expect.stringMatching(/there is no \/restart[^]*\/\/…/),
    });
    const long = await chat(["so it is ".repeat(200)]);
    expect({ code: long.code, stdout: long.stdout, stderr: long.stderr }).toEqual({
      code: 1,
      stdout: "",
      stderr: expect.stringMatching(/the context is 256 tokens/),
    });
  }, 30_000);

  test("--max-new-tokens is cut to what the context has left", async () => {
    const words = ["--max-new-tokens", "200", "--json", "--quiet"];
    const { code, stdout } = await run(["chat", "--head", chain.head, ...words], {
      stdin: new Blob(["so it is ".repeat(25)]),
    });
    const { usage } = JSON.parse(stdout);
    expect({ code, prompt: usage.prompt_tokens > 56 }).toEqual({ code: 0, prompt: true });
    expect(usage.prompt_tokens + usage.completion_tokens).toBeLessThanOrEqual(256);
  }, 30_000);

  test("bytes that are no UTF-8 end it with 2, and are not sent", async () => {
    const { code, stdout, stderr } = await run(["chat", "--head", chain.head], {
      stdin: new Blob([Buffer.from("caf\xe9\n", "latin1")]),
    });
    expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
    expect(stderr).toContain("line 1 of stdin is not text in UTF-8");
  }, 30_000);

  test("Ctrl-C in an answer ends the whole, and frees the nodes", async () => {
    await using one = await startChain(endless, [4]);
    const child = spawn(["chat", "--head", one.head], { stdin: new Blob(["a\nb\n"]) });
    let text = "";
    let freeMs = Infinity;
    for await (const chunk of child.stdout.pipeThrough(new TextDecoderStream())) {
      if (text === "") {
        child.kill("SIGINT");
        freeMs = await untilFree(one.nodes);
      }
      text += chunk;
    }
    expect({ code: await child.exited, text }).toEqual({ code: 130, text: expect.stringMatching(/^o[^\n]*\n$/) });
    expect(freeMs).toBeLessThan(1000);
  }, 60_000);
});

test("a model without a chat template is refused before anything is asked, with a way out", async () => {
  const { code, stdout, stderr } = await run(["chat", "--model-id", TINY, "--log-level", "error"]);
  expect({ code, stdout }).toEqual({ code: 1, stdout: "" });
  expect(stderr).toMatch(/no chat template[^]*Instruct[^]*meshnet generate/);
}, 30_000);

describe("at a terminal", () => {
  test("answers come to messages, Ctrl-C ends an answer and not the chat, Ctrl-D does", async () => {
    await using screen = new Screen(["chat", "--model-id", endless, "--log-level", "error"]);
    await screen.shows(/\/help tells the commands.*\n.*> $/s);
    expect(screen.colours).not.toContain("\u001b[31m"); // red, as Bun's console.error has it
    screen.type("a\r");
    await screen.shows(/on and on/);
    screen.type("\u0003");
    await screen.shows(/stopped, the first after .*\n.*> $/s);
    screen.type("/nonsense\r");
    await screen.shows(/there is no \/nonsense[^]*\/reset[^]*> $/);
    screen.type("again\r");
    await screen.shows(/on and on/);
    screen.type("\u0003");
    await screen.shows(/stopped, the first after .*\n.*> $/s);
    screen.type("\u0003");
    await screen.shows(/Ctrl-C once more, or Ctrl-D, ends[^]*> $/);
    screen.type("\u0004");
    expect(await screen.exited).toBe(0);
  }, 60_000);

  test("a context that is full names what has room, and a new conversation has", async () => {
    await using screen = new Screen(["chat", "--head", chain.head, "--quiet"]);
    await screen.shows(/> $/);
    screen.type("so it is\r");
    await screen.shows(/\n> $/); // all of the context, or the model's own end
    screen.type(`${"so it is ".repeat(60)}\r`);
    await screen.shows(
      /the context is 256 tokens[^]*shorten the prompt, or begin a new conversation with \/reset\n> $/,
    );
    screen.type("/reset\r");
    await screen.shows(/> $/);
    screen.type("so it is\r");
    await screen.shows(/so it is\n[^]*\w[^]*\n> $/);
    expect(screen.colours).not.toContain("\u001b[31m");
    screen.type("\u0004");
    expect(await screen.exited).toBe(0);
  }, 60_000);

  test("each line of what is pasted is answered, and the rest waits at the prompt", async () => {
    await using screen = new Screen(["chat", "--model-id", endless, "--log-level", "error", "--max-new-tokens", "8"]);
    await screen.shows(/> $/);
    screen.type("a\rb\rhal");
    await screen.shows(/on and o\n8 tokens.*\n> b\non and o\n8 tokens.*\n> hal$/);
    screen.type("f\r");
    await screen.shows(/on and o\n8 tokens.*\n> $/);
  }, 60_000);

  test("Ctrl-C in an answer drops what was pasted behind its question", async () => {
    await using screen = new Screen(["chat", "--model-id", endless, "--log-level", "error"]);
    await screen.shows(/> $/);
    screen.type("a\rb\r");
    await screen.shows(/on and on/);
    screen.type("\u0003");
    await screen.shows(/stopped, the first after .*\n> $/);
    screen.type("c");
    await screen.shows(/^[^a-z]*c$/);
  }, 60_000);

  test("Ctrl-Z stops it at the prompt, and it goes on with fg", async () => {
    await using screen = new Screen([], ["bash", "--norc", "--noprofile", "-i"]);
    await screen.shows(/\$ $|# $/);
    screen.type(`'${MESHNET}' chat --model-id '${endless}' --log-level error --max-new-tokens 8\r`);
    await screen.shows(/Ctrl-D ends\n> $/);
    for (let times = 0; times < 2; times++) {
      screen.type("\u001a");
      await screen.shows(/Stopped[^]*(\$|#) $/);
      screen.type("fg\r");
      await screen.shows(/> $/);
      screen.type("a\r");
      await screen.shows(/on and o\n8 tokens.*\n> $/);
    }
    screen.type("\u0004");
    await screen.shows(/(\$|#) $/);
  }, 60_000);

  test("Ctrl-Z does nothing where no shell could continue it", async () => {
    await using screen = new Screen(["chat", "--model-id", endless, "--log-level", "error", "--max-new-tokens", "8"]);
    await screen.shows(/> $/);
    screen.type("a\u001a");
    await screen.shows(/> a$/);
    screen.type("\r");
    await screen.shows(/on and o\n8 tokens.*\n> $/);
  }, 60_000);

  test("a second Ctrl-C at the prompt ends it too", async () => {
    await using screen = new Screen(["chat", "--head", chain.head]);
    await screen.shows(/> $/);
    screen.type("half a messa\u0003");
    await screen.shows(/half a messa[^]*> $/);
    screen.type("\u0003");
    expect(await screen.exited).toBe(0);
  }, 60_000);
});

// oxlint-disable-next-line no-control-regex
const COLOUR = /\u001b\[3\dm/g;

/** The binary at a terminal, or another command. */
class Screen implements AsyncDisposable {
  #text = "";
  readonly #colours: string[] = [];
  #changed = Promise.withResolvers<void>();
  readonly #child: Bun.Subprocess;

  constructor(words: string[], command = [MESHNET]) {
    this.#child = Bun.spawn([...command, ...words], {
      cwd: "/",
      env: { PATH: process.env["PATH"], HOME: process.env["HOME"], TERM: "xterm" },
      terminal: {
        cols: 100,
        rows: 30,
        data: (_, bytes) => {
          const text = new TextDecoder().decode(bytes);
          this.#text += text;
          this.#colours.push(...(text.match(COLOUR) ?? []));
          this.#changed.resolve();
          this.#changed = Promise.withResolvers();
        },
      },
    });
  }

  /** Colours that were switched on since the beginning. */
  get colours(): readonly string[] {
    return this.#colours;
  }

  get exited(): Promise<number> {
    return this.#child.exited;
  }

  type(keys: string): void {
    this.#child.terminal!.write(keys);
  }

  /** Resolves when what came since the last look is so. */
  async shows(expected: RegExp): Promise<void> {
    const plain = () => Bun.stripANSI(this.#text).replaceAll("\r", "");
    const end = performance.now() + 20_000;
    while (!expected.test(plain())) {
      const left = end - performance.now();
      if (left < 0) throw new Error(`${expected} did not come, but ${JSON.stringify(plain())}`);
      await Promise.race([this.#changed.promise, Bun.sleep(left)]);
    }
    this.#text = "";
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#child.kill("SIGKILL");
    await this.exited;
  }
}
