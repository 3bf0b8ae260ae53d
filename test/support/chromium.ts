import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { brotliDecompressSync } from "node:zlib";

/** The npm package that has Chromium's headless shell, some libraries that machines may lack, and a font. For Linux x64. */
const PACKAGE = join(import.meta.dir, "../../node_modules/@sparticuz/chromium/bin");
const START_MS = 20_000;

type Child = Bun.Subprocess<"ignore", "ignore", "pipe">;

/** An answer or an event of the DevTools protocol. */
interface Message {
  readonly id?: number;
  readonly method?: string;
  readonly sessionId?: string;
  readonly params?: Record<string, unknown>;
  readonly result?: unknown;
  readonly error?: { readonly message: string };
}

/** A headless Chromium with a profile of its own, driven by the DevTools protocol. */
export class Chromium implements AsyncDisposable {
  readonly #folder: string;
  readonly #child: Child;
  readonly #socket: WebSocket;
  readonly #waiting = new Map<number, PromiseWithResolvers<unknown>>();
  readonly #pages = new Map<string, Page>();
  #calls = 0;

  private constructor(folder: string, child: Child, socket: WebSocket) {
    this.#folder = folder;
    this.#child = child;
    this.#socket = socket;
    socket.addEventListener("message", ({ data }) => this.#take(JSON.parse(String(data))));
    socket.addEventListener("close", () => {
      for (const { reject } of this.#waiting.values()) reject(new Error("Chromium is gone"));
    });
  }

  /** Rejects with Chromium's own words where it cannot run on this machine. */
  static async start(): Promise<Chromium> {
    const folder = mkdtempSync(join(tmpdir(), "meshnet-chromium-"));
    let child: Child | undefined;
    try {
      unpack(folder);
      child = Bun.spawn([join(folder, "chromium"), ...FLAGS, `--user-data-dir=${join(folder, "profile")}`], {
        env: {
          PATH: process.env.PATH,
          HOME: folder,
          TMPDIR: folder,
          LD_LIBRARY_PATH: join(folder, "lib"),
          FONTCONFIG_FILE: join(folder, "fonts.conf"),
        },
        stdio: ["ignore", "ignore", "pipe"],
      });
      const socket = new WebSocket(await addressOf(child));
      const opened = Promise.withResolvers<void>();
      socket.addEventListener("open", () => opened.resolve());
      socket.addEventListener("error", () => opened.reject(new Error("Chromium does not take the connection")));
      await opened.promise;
      return new Chromium(folder, child, socket);
    } catch (error) {
      child?.kill("SIGKILL");
      rmSync(folder, { recursive: true, force: true });
      throw error;
    }
  }

  /** A new tab, with cookies and cache of its own. */
  async open(): Promise<Page> {
    const { browserContextId } = await this.call<{ browserContextId: string }>("Target.createBrowserContext");
    const target = { url: "about:blank", browserContextId };
    const { targetId } = await this.call<{ targetId: string }>("Target.createTarget", target);
    const { sessionId } = await this.call<{ sessionId: string }>("Target.attachToTarget", { targetId, flatten: true });
    const page = new Page((method, params) => this.call(method, params, sessionId));
    this.#pages.set(sessionId, page);
    for (const domain of ["Page", "Network", "Runtime", "Log"]) await page.call(`${domain}.enable`);
    return page;
  }

  call<T>(method: string, params: object = {}, sessionId?: string): Promise<T> {
    const id = ++this.#calls;
    const reply = Promise.withResolvers<unknown>();
    this.#waiting.set(id, reply);
    this.#socket.send(JSON.stringify({ id, method, params, sessionId }));
    return reply.promise as Promise<T>;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#socket.close();
    this.#child.kill("SIGKILL");
    await this.#child.exited;
    rmSync(this.#folder, { recursive: true, force: true, maxRetries: 5 });
  }

  #take({ id, method, sessionId, params, result, error }: Message): void {
    if (id === undefined) return this.#pages.get(sessionId ?? "")?.tell(method!, params ?? {});
    const reply = this.#waiting.get(id);
    this.#waiting.delete(id);
    if (error) reply?.reject(new Error(error.message));
    else reply?.resolve(result);
  }
}

/** A tab. */
export class Page {
  /** URLs of all requests that it has made, or tried to make. */
  readonly requests: string[] = [];
  /** What the console and the browser said of errors: exceptions, violations of a policy, failed loads. */
  readonly complaints: string[] = [];
  readonly call: <T>(method: string, params?: object) => Promise<T>;
  readonly #listeners = new Map<string, (params: Record<string, unknown>) => void>();

  constructor(call: Page["call"]) {
    this.call = call;
  }

  /** Calls `listener` at each event of this name. */
  on(method: string, listener: (params: Record<string, unknown>) => void): void {
    this.#listeners.set(method, listener);
  }

  tell(method: string, params: Record<string, unknown>): void {
    this.#listeners.get(method)?.(params);
    if (method === "Network.requestWillBeSent") this.requests.push((params["request"] as { url: string }).url);
    const isComplaint =
      method === "Runtime.exceptionThrown" ||
      (method === "Runtime.consoleAPICalled" && params["type"] === "error") ||
      (method === "Log.entryAdded" && (params["entry"] as { level: string }).level === "error");
    if (isComplaint) this.complaints.push(JSON.stringify(params));
  }

  async goto(url: string): Promise<void> {
    const { errorText } = await this.call<{ errorText?: string }>("Page.navigate", { url });
    if (errorText !== undefined) throw new Error(`${url}: ${errorText}`);
    await this.until("document.readyState === 'complete'");
  }

  /** What an expression of JavaScript comes to in the page, as JSON has it. `helpers`: declarations that it needs. */
  async evaluate<T>(expression: string, helpers = ""): Promise<T> {
    if (helpers !== "") return this.evaluate(`(() => { ${helpers}; return ${expression}; })()`);
    const { result, exceptionDetails } = await this.call<{
      result: { value: T };
      exceptionDetails?: { exception?: { description?: string } };
    }>("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
    if (exceptionDetails) throw new Error(`${expression}: ${exceptionDetails.exception?.description}`);
    return result.value;
  }

  /** Waits for an expression to be true; what it is instead stands in the test's time limit. */
  async until(expression: string): Promise<void> {
    while (!(await this.evaluate<boolean>(`!!(${expression})`))) await Bun.sleep(15);
  }

  /** Types as a keyboard does, into what has the focus. */
  async type(text: string): Promise<void> {
    await this.call("Input.insertText", { text });
  }

  /** Presses and releases a key. */
  async press(key: "Enter" | "Escape" | "Tab" | " ", { shift = false } = {}): Promise<void> {
    const { code, keyCode, text } = KEYS[key];
    const event = { key, code, windowsVirtualKeyCode: keyCode, modifiers: shift ? 8 : 0 };
    await this.call("Input.dispatchKeyEvent", { ...event, type: text === "" ? "rawKeyDown" : "keyDown", text });
    await this.call("Input.dispatchKeyEvent", { ...event, type: "keyUp" });
  }

  async viewport(width: number, height: number, { mobile = false } = {}): Promise<void> {
    const metrics = { width, height, deviceScaleFactor: mobile ? 2 : 1, mobile };
    await this.call("Emulation.setDeviceMetricsOverride", metrics);
  }

  /** What the reader's system asks for. */
  async media(features: Record<string, string>): Promise<void> {
    const list = Object.entries(features).map(([name, value]) => ({ name, value }));
    await this.call("Emulation.setEmulatedMedia", { features: list });
  }

  async screenshot(path: string): Promise<void> {
    const { data } = await this.call<{ data: string }>("Page.captureScreenshot", { format: "png" });
    writeFileSync(path, Buffer.from(data, "base64"));
  }
}

const KEYS = {
  Enter: { code: "Enter", keyCode: 13, text: "\r" },
  Escape: { code: "Escape", keyCode: 27, text: "" },
  Tab: { code: "Tab", keyCode: 9, text: "" },
  " ": { code: "Space", keyCode: 32, text: " " },
};

/** Nothing here turns off what guards pages from each other. A sandbox needs rights that a container may not have. */
const FLAGS = [
  "--headless=shell",
  "--no-sandbox",
  "--no-zygote",
  "--disable-gpu",
  "--disable-dev-shm-usage",
  "--disable-background-networking",
  "--no-first-run",
  "--remote-debugging-port=0",
  "about:blank",
];

function unpack(folder: string): void {
  const read = (name: string) => brotliDecompressSync(readFileSync(join(PACKAGE, name)));
  writeFileSync(join(folder, "chromium"), read("chromium.br"), { mode: 0o755 });
  for (const name of ["al2023.tar", "fonts.tar"]) {
    writeFileSync(join(folder, name), read(`${name}.br`));
    const { exitCode, stderr } = Bun.spawnSync(["tar", "-xf", name], { cwd: folder });
    if (exitCode !== 0) throw new Error(`tar: ${stderr}`);
  }
  mkdirSync(join(folder, "profile"));
  const fonts = `<dir>${join(folder, "fonts")}</dir><cachedir>${join(folder, "font-cache")}</cachedir>`;
  writeFileSync(join(folder, "fonts.conf"), `<?xml version="1.0"?><fontconfig>${fonts}</fontconfig>`);
}

/** Of the DevTools, which it says on its stderr. What it says later is nobody's concern, but has to be read. */
function addressOf(child: Child): Promise<string> {
  const timer = setTimeout(() => child.kill("SIGKILL"), START_MS);
  const address = Promise.withResolvers<string>();
  const follow = async () => {
    let said = "";
    for await (const chunk of child.stderr.pipeThrough(new TextDecoderStream())) {
      if (said.length < 65_536) said += chunk;
      const [, found] = /DevTools listening on (ws:\S+)/.exec(said) ?? [];
      if (found === undefined) continue;
      clearTimeout(timer);
      address.resolve(found);
    }
    clearTimeout(timer);
    address.reject(new Error(said.trim() || "Chromium ended without a word"));
  };
  follow().catch(address.reject);
  return address.promise;
}
