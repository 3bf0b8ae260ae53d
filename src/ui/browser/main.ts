// The page at `/` of a head: a conversation with the model, and what the chain is doing. It keeps nothing: what was said
// is gone with the page.
import type { NodeInfo } from "../../protocol/info.ts";
import { ChainView } from "./chain-view.ts";
import { answerTo, CONTEXT_FULL } from "./answer.ts";
import type { Settings, Turn } from "./conversation.ts";
import { byId, setText } from "./dom.ts";
import { EndKeeper } from "./end-keeper.ts";
import { chainInfo, headInfo, Refusal, type Usage } from "./head.ts";
import { Pace } from "./pace.ts";
import { whileVisible } from "./poll.ts";
import { SettingsForm } from "./settings-form.ts";
import { TurnView, type Way } from "./turn-view.ts";

const CHAIN_MS = 2_000;
const CHAIN_TIMEOUT_MS = 5_000;

const end = new EndKeeper(byId("conversation", HTMLElement));
const log = byId("log", HTMLDivElement);
const note = byId("note", HTMLParagraphElement);
const status = byId("status", HTMLParagraphElement);
const form = byId("composer", HTMLFormElement);
const prompt = byId("prompt", HTMLTextAreaElement);
const send = byId("send", HTMLButtonElement);
const stop = byId("stop", HTMLButtonElement);
const settings = new SettingsForm();
const chain = new ChainView();

let turns: Turn[] = [];
let running: AbortController | undefined;
/** The head, once it has said what it is. */
let known: NodeInfo | undefined;

whileVisible(CHAIN_MS, lookAtChain);
prompt.focus();

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (running || text.trim() === "") return;
  prompt.value = "";
  void say(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) running?.abort();
});
stop.addEventListener("click", () => running?.abort());
byId("new", HTMLButtonElement).addEventListener("click", beginAnew);

function beginAnew(): void {
  running?.abort();
  turns = [];
  log.replaceChildren();
  setText(status, "New conversation");
  prompt.focus();
}

/** Says `text`, and shows the answer while it comes. One that is stopped belongs to the conversation, one that fails not. */
async function say(text: string): Promise<void> {
  const asked: Turn = { role: "user", text };
  const question = new TurnView("user", "You");
  const answer = new TurnView("assistant", modelName());
  question.show(text);
  log.append(question.element, answer.element);
  end.go();

  const control = new AbortController();
  const before = turns;
  begin(control, answer);
  const pace = new Pace();
  let said = "";
  let usage: Usage | undefined;
  let outcome = "";
  let failed = false;
  let used: Settings | undefined;
  const drawing = drawer(() => {
    answer.show(said);
    answer.facts = [...pace.facts(usage?.completion_tokens), outcome].filter((fact) => fact !== "").join(" · ");
  });
  try {
    await knowHead(control.signal);
    used = settings.read();
    const facts = { isChat: isChat(), maxContext: known?.max_context ?? 0 };
    for await (const part of answerTo({ turns: [...before, asked], settings: used, ...facts }, control.signal)) {
      if (part.text !== "") pace.count();
      said += part.text;
      usage = part.usage ?? usage;
      if (part.finish === "length") outcome = "ended by the limit of tokens";
      drawing.soon();
    }
  } catch (error) {
    failed = !control.signal.aborted;
    if (!failed) outcome = "stopped";
    else fail(answer, error, waysOut(error, used, { text, before, question, answer }));
  }
  if (said === "" && outcome === "" && !failed) outcome = "no text";
  drawing.now();
  if (turns === before && said !== "" && !failed) {
    turns = [...before, asked, { role: "assistant", text: said }];
  }
  finish(control, answer, said === "" ? outcome : said);
}

function begin(control: AbortController, answer: TurnView): void {
  running = control;
  answer.isGrowing = true;
  send.hidden = true;
  stop.hidden = false;
  setText(status, "The model is answering");
  prompt.focus();
}

function finish(control: AbortController, answer: TurnView, news: string): void {
  answer.isGrowing = false;
  if (running !== control) return; // another conversation has begun
  running = undefined;
  const hadFocus = document.activeElement === stop;
  stop.hidden = true;
  send.hidden = false;
  if (hadFocus) prompt.focus();
  if (answer.element.isConnected) setText(status, news); // read out once, whole
}

function fail(answer: TurnView, error: unknown, ways: readonly Way[]): void {
  const isRefusal = error instanceof Refusal;
  const message = error instanceof Error ? error.message : String(error);
  answer.showProblem(message, isRefusal ? error.code : "page", ways);
  if (!isRefusal) console.error(error); // a bug of the page
}

interface Failed {
  readonly text: string;
  /** The conversation that it was said in. */
  readonly before: readonly Turn[];
  readonly question: TurnView;
  readonly answer: TurnView;
}

/** What may help after a failure. Into a context that is full the same does not go again, unless fewer tokens are asked for. */
function waysOut(error: unknown, used: Settings | undefined, failed: Failed): Way[] {
  const { text, before, question, answer } = failed;
  const isFull = error instanceof Refusal && error.code === CONTEXT_FULL;
  const takeBack = () => {
    question.element.remove();
    answer.element.remove();
  };
  /** In place of what failed, in the conversation as it is now. */
  const again = () => {
    if (running) return;
    takeBack();
    void say(text);
  };
  const edit = (prepare: () => void) => () => {
    if (running) return;
    prepare();
    if (prompt.value === "") prompt.value = text; // what is being written meanwhile is worth more
    prompt.focus();
  };
  if (!isFull) return [{ name: "Try again", go: again }];
  const ways: Way[] = [{ name: "Change the message", go: edit(takeBack) }];
  if (before.length > 0) ways.unshift({ name: "New conversation", go: edit(beginAnew) });
  if (used?.mayBeFewer === false) ways.unshift({ name: "Try again", go: again });
  return ways;
}

/** Draws at most once a frame. */
function drawer(draw: () => void): { soon(): void; now(): void } {
  let frame: number | undefined;
  const now = () => {
    if (frame !== undefined) cancelAnimationFrame(frame);
    frame = undefined;
    draw();
    end.changed();
  };
  return { now, soon: () => (frame ??= requestAnimationFrame(now)) };
}

async function lookAtChain(): Promise<void> {
  const signal = AbortSignal.timeout(CHAIN_TIMEOUT_MS);
  try {
    await knowHead(signal);
    const info = await chainInfo(signal);
    chain.show(info);
    if (info.nodes[0]?.node !== known?.node) known = undefined; // another process, which may have another model
  } catch (error) {
    chain.showProblem(error instanceof Refusal ? error.message : "The node does not answer.");
  }
}

/** Whether there are chats, and how much room. Throws as `headInfo` does. */
async function knowHead(signal: AbortSignal): Promise<void> {
  known ??= await headInfo(signal);
  setText(byId("model", HTMLSpanElement), modelName());
  note.hidden = isChat();
  settings.maxContext = known.max_context;
}

const isChat = (): boolean => known?.texts?.chat !== false;

/** Of a directory's path, or `openai-community/gpt2`: the last part. */
const modelName = (): string =>
  known?.model_id
    .replace(/[\\/]+$/, "")
    .split(/[\\/]/)
    .at(-1) ?? "Model";
