import { afterAll, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Chromium, type Page } from "../support/chromium.ts";
import { type Chain, NodeProcess, startChain } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { writeEndlessModel } from "../support/scripted-model.ts";

/** gpt2-tiny has no chat template: this one is as plain as can be. */
const TEMPLATE =
  "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
const folder = temporaryFolder();
const CHATTY = join(folder.path, "chatty");
cpSync(TINY, CHATTY, { recursive: true });
writeFileSync(join(CHATTY, "chat_template.jinja"), TEMPLATE);
const ENDLESS = join(folder.path, "endless");
writeEndlessModel(ENDLESS, "on and on, ");
afterAll(() => folder[Symbol.dispose]());

let whyNot = "";
const chromium = await Chromium.start().catch((error: unknown) => {
  whyNot = String(error).slice(0, 200);
  return undefined;
});
afterAll(() => chromium?.[Symbol.asyncDispose]());
const inChromium = chromium ? "in Chromium" : `in Chromium, which does not start here (${whyNot})`;

let chain: Chain;
let page: Page;
beforeAll(async () => {
  chain = await startChain(CHATTY, [2, 4]);
}, 60_000);
afterAll(() => chain[Symbol.asyncDispose]());

/** Opens the page anew, and waits until it knows the chain. */
async function open(url = chain.head): Promise<Page> {
  const opened = await chromium!.open();
  await opened.viewport(900, 700);
  await opened.goto(url);
  await opened.until("/ready · /.test(document.querySelector('#chain-summary').textContent)");
  return opened;
}

const textOf = (selector: string) => page.evaluate<string>(`document.querySelector('${selector}').innerText`);
const say = async (text: string) => {
  await page.type(text);
  await page.press("Enter");
};
const ANSWER = ".turn.assistant:last-child .text";
const FACTS = ".turn.assistant:last-child .facts";
const isAnswered = (turns: number) =>
  page.until(`document.querySelectorAll('.turn').length === ${turns} && document.querySelector('#stop').hidden`);
const setField = (id: string, value: string) => page.evaluate(`document.getElementById('${id}').value = '${value}'`);

const openSessions = async (head: string): Promise<number> => {
  const info = (await (await fetch(`${head}info`)).json()) as { cache: { sessions: number } };
  return info.cache.sessions;
};

describe.skipIf(!chromium)(`the page of a head, ${inChromium},`, () => {
  beforeEach(async () => {
    page = await open();
  });

  test("sends what is typed at Enter, and the answer grows while it comes, to what the API gives", async () => {
    await page.evaluate(`
      window.lengths = [];
      new MutationObserver(() => lengths.push(document.querySelector('${ANSWER}')?.innerText.length ?? 0))
        .observe(document.querySelector('#log'), { subtree: true, childList: true, characterData: true });
    `);
    await setField("temperature", "0");
    await setField("max-tokens", "200");
    await page.type("The licence says");
    await page.press("Enter", { shift: true });
    await page.type("in its preamble");
    expect(await page.evaluate("document.querySelectorAll('.turn').length")).toBe(0); // Shift+Enter only begins a line
    await page.press("Enter");
    await isAnswered(2);

    expect(await textOf(".turn.user .text")).toBe("The licence says\nin its preamble");
    expect(await page.evaluate("document.querySelector('#prompt').value")).toBe("");
    expect(await page.evaluate("document.activeElement.id")).toBe("prompt");
    const messages = [{ role: "user", content: "The licence says\nin its preamble" }];
    const body = JSON.stringify({ messages, temperature: 0, max_tokens: 200 });
    const reply = await fetch(`${chain.head}v1/chat/completions`, { method: "POST", body });
    const { choices } = (await reply.json()) as { choices: { message: { content: string } }[] };
    const words = (text: string) => text.split(/\s+/).filter((word) => word !== "");
    expect(words(await textOf(ANSWER))).toEqual(words(choices[0]!.message.content));
    const lengths = await page.evaluate<number[]>("lengths.filter((length) => length > 0)");
    expect(new Set(lengths).size).toBeGreaterThan(5);
    expect(lengths).toEqual(lengths.toSorted((a, b) => a - b));
    expect(await textOf(FACTS)).toMatch(
      /^200 tokens · [\d.]+ tokens\/s · the first after [\d.]+ m?s · ended by the limit/,
    );
    expect(await textOf("#status")).toContain(words(choices[0]!.message.content)[0]!); // what screen readers say
  });

  test("stops an answer at Escape and by the keyboard's way to Stop; the chain is free, and goes on from it", async () => {
    await using endless = await startChain(ENDLESS, [2, 4]);
    page = await open(endless.head);
    for (const stop of ["Escape", "button"]) {
      await setField("max-tokens", "4000");
      await say("This program is free");
      await page.until(`document.querySelector('${ANSWER}').innerText.length > 10`);
      if (stop === "Escape") await page.press("Escape");
      else {
        await page.press("Tab");
        expect(await page.evaluate("document.activeElement.id")).toBe("stop");
        await page.press(" ");
      }
      await page.until("document.querySelector('#stop').hidden");
      expect(await textOf(FACTS)).toEndWith("stopped");
      const text = await textOf(ANSWER);
      const began = performance.now();
      while ((await openSessions(endless.head)) > 0) await Bun.sleep(10);
      expect(performance.now() - began).toBeLessThan(1000);
      expect(await textOf(ANSWER)).toBe(text);
      expect(await page.evaluate("document.activeElement.id")).toBe("prompt");
      if (stop === "Escape") await page.evaluate("document.querySelector('#new').click()");
    }
    const partial = await page.evaluate<string>(`document.querySelector('${ANSWER}').textContent`);
    await page.evaluate(
      "const f = fetch; window.fetch = (url, init) => (window.sent = init.body ?? window.sent, f(url, init))",
    );
    await setField("max-tokens", "4");
    await say("and");
    await isAnswered(4);
    const { messages } = JSON.parse(await page.evaluate<string>("sent")) as { messages: { content: string }[] };
    expect(messages.map(({ content }) => content.length > 0)).toEqual([true, true, true]);
    expect(messages[1]!.content.replaceAll(/\s/g, "")).toBe(partial.replaceAll(/\s/g, ""));
  }, 30_000);

  test("sends the system prompt and settings, forgets with New conversation, and says what cannot be", async () => {
    await page.evaluate(
      "const f = fetch; window.fetch = (url, init) => (window.sent = init.body ?? window.sent, f(url, init))",
    );
    await setField("system", "Be short.");
    await setField("temperature", "0.5");
    await setField("max-tokens", "5");
    await say("hi");
    await isAnswered(2);
    expect(JSON.parse(await page.evaluate<string>("sent"))).toMatchObject({
      messages: [{ role: "system" }, { role: "user", content: "hi" }],
      temperature: 0.5,
      max_tokens: 5,
    });
    await page.evaluate("document.querySelector('#new').click()");
    expect(await page.evaluate("document.querySelectorAll('.turn').length")).toBe(0);

    await setField("max-tokens", "4000");
    await say("too much");
    await isAnswered(2);
    const problem = await textOf(".turn [role=alert]");
    expect(problem).toMatch(/the context is 256 tokens.*ask for at most \d+ tokens/);
    expect(problem).toContain("context_length_exceeded");
    await setField("max-tokens", "3");
    await page.evaluate("document.querySelector('[role=alert] button').click()"); // Try again
    await isAnswered(2);
    expect(await page.evaluate("document.querySelector('[role=alert]')")).toBeNull();
    expect(JSON.parse(await page.evaluate<string>("sent")).messages).toHaveLength(2);

    await setField("temperature", "3"); // is told at the field, which opens for that
    await say("x");
    expect(await page.evaluate("document.querySelector('#settings').open")).toBe(true);
    expect(await page.evaluate("document.querySelectorAll('.turn').length")).toBe(2);
  });

  test("shows markup that a model or a user writes as text, and nothing of it lives", async () => {
    const evil = [
      '<img src=x onerror="window.hacked=1"><script>window.hacked=2</scr' + "ipt>",
      `<a href="javascript:window.hacked=3">a</a> <iframe srcdoc="<script>parent.hacked=4</scr` + `ipt>"></iframe>`,
      "`<b>code</b>`\n```html\n<svg onload=window.hacked=5>\n```\n<style>*{display:none}</style>",
    ].join("\n\n");
    // What a model writes is not in a test's hand: here it comes instead of the head's answer.
    const events = [...evil].map((text) => `data: ${JSON.stringify({ choices: [{ delta: { content: text } }] })}\n\n`);
    await page.call("Fetch.enable", { patterns: [{ urlPattern: "*/v1/chat/completions" }] });
    page.on("Fetch.requestPaused", ({ requestId }) => {
      const body = Buffer.from(`${events.join("")}data: [DONE]\n\n`).toString("base64");
      const responseHeaders = [{ name: "Content-Type", value: "text/event-stream" }];
      void page.call("Fetch.fulfillRequest", { requestId, responseCode: 200, responseHeaders, body });
    });
    await say(evil);
    await isAnswered(2);
    for (const selector of [".turn.user .text", ANSWER]) {
      const text = await textOf(selector);
      for (const part of ["<img src=x onerror", "<script>", "<iframe", "<svg onload", "<style>"])
        expect(text).toContain(part);
      const tags = `[...document.querySelectorAll('${selector} *')].map((element) => element.localName)`;
      expect(new Set(await page.evaluate<string[]>(tags))).toEqual(new Set(["p", "code", "pre"]));
    }
    await Bun.sleep(100);
    expect(await page.evaluate("window.hacked === undefined")).toBe(true);
    expect(page.complaints).toEqual([]);

    // Even a page with a mistake in it could not: the browser is told to refuse markup, and calls of other servers.
    expect(await page.evaluate("try { document.body.innerHTML = '<b>'; 'taken' } catch { 'refused' }")).toBe("refused");
    const tail = await chain.nodes[1]!.url;
    expect(await page.evaluate(`fetch('${tail}info').then(() => 'taken', () => 'refused')`)).toBe("refused");
  });

  test("asks nobody but its own head, and its files are small", async () => {
    await setField("max-tokens", "5");
    await say("hi");
    await isAnswered(2);
    expect(page.requests.filter((url) => !url.startsWith(chain.head))).toEqual([]);
    const paths = [...new Set(page.requests.map((url) => url.slice(chain.head.length)))];
    expect(paths.toSorted()).toEqual(["", "chain", "info", "ui/page.css", "ui/page.js", "v1/chat/completions"]);
    expect(page.complaints).toEqual([]);
    const files = ["", "ui/page.css", "ui/page.js", "ui/icon.svg"];
    const sizes = await Promise.all(files.map(async (file) => (await (await fetch(chain.head + file)).bytes()).length));
    expect(Math.min(...sizes)).toBeGreaterThan(0);
    expect(sizes.reduce((a, b) => a + b)).toBeLessThan(40_000);
  });

  test("fits a phone of 320 pixels, with all of it open and words that do not end", async () => {
    await page.viewport(320, 568, { mobile: true });
    await setField("max-tokens", "20");
    await say("x".repeat(90));
    await isAnswered(2);
    await page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true");
    await page.until("document.querySelectorAll('#chain-nodes li').length === 2");
    expect(await page.evaluate("[innerWidth, document.documentElement.scrollWidth]")).toEqual([320, 320]);
    expect(await page.evaluate("document.querySelector('#conversation').scrollWidth")).toBeLessThanOrEqual(320);
    expect(await page.evaluate("document.documentElement.scrollHeight")).toBe(568); // only the conversation scrolls
    await page.evaluate("for (const details of document.querySelectorAll('details')) details.open = false");
    const box = await page.evaluate<{ bottom: number; height: number }>(
      "(({ bottom, height }) => ({ bottom, height }))(document.querySelector('#send').getBoundingClientRect())",
    );
    expect(box.bottom).toBeLessThanOrEqual(568);
    expect(box.height).toBeGreaterThanOrEqual(40); // a finger's
  });

  test("can be read in the light and in the dark, and does not blink for those who ask for stillness", async () => {
    await setField("max-tokens", "5");
    await say("with `code`");
    await isAnswered(2);
    await page.evaluate(
      "document.querySelector('#chain').open = true; document.querySelector('#settings').open = true",
    );
    for (const scheme of ["light", "dark"]) {
      await page.media({ "prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce" });
      const [ground] = await page.evaluate<number[]>("rgbOf(getComputedStyle(document.body).backgroundColor)", COLOURS);
      expect(ground! > 128).toBe(scheme === "light");
      const faint = await page.evaluate<string[]>("faintTexts()", COLOURS);
      expect(faint).toEqual([]);
    }
    await page.evaluate("document.querySelector('.turn.assistant').classList.add('growing')");
    const cursor = "getComputedStyle(document.querySelector('.growing .text > p:last-child'), '::after').animationName";
    expect(await page.evaluate(cursor)).toBe("none");
    await page.media({ "prefers-reduced-motion": "no-preference" });
    expect(await page.evaluate(cursor)).toBe("blink");
  });

  test("is reached by Tab alone, in order, with a name for each control and a mark at the one that has the focus", async () => {
    await page.evaluate("document.querySelector('#settings').open = true; document.querySelector('#new').focus()");
    const controls = ["chain", "conversation", "settings", "system", "temperature", "max-tokens", "prompt", "send"];
    const reached: string[] = [];
    for (const _ of controls) {
      await page.press("Tab");
      const focused = "document.activeElement";
      const style = `getComputedStyle(${focused})`;
      const [name, ...outline] = await page.evaluate<[string, string, string]>(
        `[${focused}.id || ${focused}.parentElement.id, ${style}.outlineStyle, ${style}.outlineWidth]`,
      );
      reached.push(name);
      expect(outline).toEqual(["solid", "3px"]);
    }
    expect(reached).toEqual(controls);
    const { nodes } = await page.call<{
      nodes: { role?: { value: string }; name?: { value: string }; ignored: boolean }[];
    }>("Accessibility.getFullAXTree");
    const roles = new Set(["button", "textbox", "spinbutton", "main", "DisclosureTriangle"]);
    const named = nodes.filter(({ role, ignored }) => !ignored && roles.has(role?.value ?? ""));
    expect(named.length).toBeGreaterThanOrEqual(9);
    expect(named.filter(({ name }) => !name?.value)).toEqual([]);
  });

  test("shows both nodes with layers, device, sessions and speed, and asks for them only while it is seen", async () => {
    await using endless = await startChain(ENDLESS, [2, 4]);
    page = await open(endless.head);
    await page.evaluate("document.querySelector('#chain').open = true");
    const rows = () =>
      page.evaluate<string[]>("[...document.querySelectorAll('#chain-nodes li')].map((row) => row.innerText)");
    const info = (await (await fetch(`${endless.head}info`)).json()) as { device: string };
    for (const [at, layers] of ["Layers 0–1", "Layers 2–3"].entries()) {
      const row = (await rows())[at]!;
      expect(row).toStartWith(`${layers} ready`);
      for (const fact of [info.device, "bfloat16", "sessions", "tokens/s"]) expect(row).toContain(fact);
    }
    await setField("max-tokens", "4000");
    await say("go on");
    await page.until(
      "[...document.querySelectorAll('#chain-nodes li')].every((row) => row.innerText.includes('1 session '))",
    );
    await page.until("parseFloat(/([\\d.]+) tokens/.exec(document.querySelector('#chain-summary').innerText)[1]) > 1");

    await page.evaluate(`Object.defineProperty(document, 'hidden', { configurable: true, get: () => true });
      document.dispatchEvent(new Event('visibilitychange'))`);
    const asked = () => page.requests.filter((url) => url.endsWith("/chain")).length;
    await Bun.sleep(200); // one may be on its way
    const before = asked();
    await Bun.sleep(2200);
    expect(asked()).toBe(before);
    await page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))");
    while (asked() === before) await Bun.sleep(15);
  }, 30_000);

  test("goes on from the text where the model has no chat template, and says so", async () => {
    await using alone = new NodeProcess(["--model-id", TINY]);
    page = await open(await alone.ready());
    expect(await textOf("#note")).toContain("no chat template");
    await setField("temperature", "0");
    await setField("max-tokens", "30");
    const { greedy } = JSON.parse(readFileSync(join(TINY, "oracle.json"), "utf8"));
    await say(greedy.prompts.free);
    await isAnswered(2);
    const text = (await textOf(ANSWER)).trim();
    expect(text.length).toBeGreaterThan(40);
    expect(greedy.continuations["free.fp32"].trim()).toStartWith(text);
    expect(page.requests.some((url) => url.endsWith("/v1/completions"))).toBe(true);
  }, 30_000);

  test.each([
    ["without a chat template", false],
    ["with one", true],
  ])(
    "gives answers of half the context, then what is left of it, then the way out: a model %s",
    async (_, isChat) => {
      await using alone = new NodeProcess(["--model-id", isChat ? CHATTY : TINY]);
      page = await open(await alone.ready());
      const tokensOf = async () => Number(/^(\d+) tokens/.exec(await textOf(FACTS))?.[1]);
      await setField("temperature", "0");
      await say("This program is free");
      await isAnswered(2);
      expect(await tokensOf()).toBe(128);
      await say("You may");
      await isAnswered(4);
      const second = await tokensOf();
      expect(second).toBeGreaterThan(64);
      expect(second).toBeLessThan(128);
      await say("And so");
      await isAnswered(6);
      expect(await textOf("[role=alert]")).toContain("context_length_exceeded");
      const buttons = "[...document.querySelectorAll('[role=alert] button')]";
      const names = await page.evaluate<string[]>(`${buttons}.map((button) => button.textContent)`);
      expect(names).toEqual(["New conversation", "Change the message"]);
      await page.evaluate(`${buttons}[0].click()`);
      expect(await page.evaluate("document.querySelectorAll('.turn').length")).toBe(0);
      await page.press("Enter"); // the message is still there
      await isAnswered(2);
      expect(await textOf(".turn.user .text")).toBe("And so");
      expect(await page.evaluate("document.querySelector('[role=alert]')")).toBeNull();
    },
    30_000,
  );

  test("says which node does not answer, and when the head is gone", async () => {
    await using short = await startChain(CHATTY, [3, 4]);
    page = await open(short.head);
    await page.evaluate("document.querySelector('#chain').open = true");
    await short.nodes[1]!.stop("SIGKILL");
    await page.until("document.querySelector('#chain-summary').innerText.includes('Layer 3 silent')");
    const row = "document.querySelector('#chain-nodes li:last-child').innerText";
    expect(await page.evaluate<string>(row)).toMatch(/^Layer 3 does not answer\n.*llvmpipe.*\n.*cannot be reached/s);
    await say("hello?");
    await isAnswered(2);
    expect(await textOf("[role=alert]")).toMatch(/cannot be reached[^]*(not_ready|next_unreachable)/);
    await short.nodes[0]!.stop("SIGKILL");
    await page.until("document.querySelector('#chain-summary').innerText.includes('Is it still running?')");
  }, 30_000);
});

/** For the browser: texts that stand out from their ground by less than 4.5 : 1 (WCAG 2.2, 1.4.3). */
const COLOURS = `
  const rgbOf = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const isClear = (colour) => rgbOf(colour)[3] === 0;
  const lightness = ([r, g, b]) => [r, g, b]
    .map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  function groundOf(element) {
    const { backgroundColor } = getComputedStyle(element);
    return isClear(backgroundColor) ? groundOf(element.parentElement) : backgroundColor;
  }
  function faintTexts() {
    const hasText = (element) => element.checkVisibility() && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    return [...document.body.querySelectorAll("*")].filter(hasText).flatMap((element) => {
      const pair = [getComputedStyle(element).color, groundOf(element)].map((colour) => lightness(rgbOf(colour)));
      const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
      return contrast < 4.5 ? [element.outerHTML + ": " + contrast] : [];
    });
  }
`;

describe("without a browser,", () => {
  const get = (url: string, headers: Record<string, string> = {}) => fetch(url, { headers });

  test("the page comes with a policy that allows its own files and its own node, and nothing else", async () => {
    const reply = await get(chain.head);
    expect(reply.headers.get("content-type")).toBe("text/html; charset=utf-8");
    const policy = reply.headers.get("content-security-policy")!;
    expect(policy).toStartWith("default-src 'none'; ");
    expect(policy).not.toMatch(/unsafe|\*|https?:/);
    expect(await reply.text()).not.toMatch(/https?:|<style|<script(?! type="module" src="ui\/page.js">)| on\w+=/);
  });

  test("calls of the page are taken and those of others are not; a node after the head has no page and says who has", async () => {
    const origin = new URL(chain.head).origin;
    expect((await get(`${chain.head}info`, { Origin: origin })).status).toBe(200);
    expect((await get(`${chain.head}info`, { Origin: "http://localhost:3000" })).status).toBe(403);
    const tail = await chain.nodes[1]!.url;
    const reply = await get(tail);
    expect(reply.status).toBe(404);
    expect(await reply.json()).toMatchObject({ error: { layers: "2-4", hint: expect.stringContaining("the head") } });
    expect((await get(`${tail}info`, { Origin: new URL(tail).origin })).status).toBe(403);
  });

  test.each([
    ["--no-ui", ["--no-ui"], {}],
    ["MESHNET_UI=0", [], { MESHNET_UI: "0" }],
  ])(
    "a head has no page with %s, and takes calls of none",
    async (_, flags, env) => {
      await using node = new NodeProcess(["--model-id", TINY, ...flags], { env });
      const url = await node.ready();
      for (const path of ["", "ui/page.js", "ui/page.css"]) expect((await get(url + path)).status).toBe(404);
      expect((await get(`${url}info`, { Origin: new URL(url).origin })).status).toBe(403);
      expect((await get(`${url}v1/models`)).status).toBe(200);
    },
    30_000,
  );
});
