// The page at `/` of a head: a conversation with the model, and what the chain is doing. It keeps nothing: what was said
// is gone with the page.
import type { NodeInfo } from "../../protocol/info.ts";
import { ChainView } from "./chain-view.ts";
import { callFor, type Turn } from "./conversation.ts";
import { byId, setText } from "./dom.ts";
import { EndKeeper } from "./end-keeper.ts";
import { chainInfo, headInfo, Refusal, streamAnswer, type Usage } from "./head.ts";
import { Pace } from "./pace.ts";
import { whileVisible } from "./poll.ts";
import { mostTokens, SettingsForm } from "./settings-form.ts";
import { TurnView } from "./turn-view.ts";

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
/** What they take of the context, at most. */
let turnTokens = 0;
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
byId("new", HTMLButtonElement).addEventListener("click", () => {
  running?.abort();
  turns = [];
  turnTokens = 0;
  log.replaceChildren();
  setText(status, "New conversation");
  prompt.focus();
});

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
  const drawing = drawer(() => {
    answer.show(said);
    answer.facts = [...pace.facts(usage?.completion_tokens), outcome].filter((fact) => fact !== "").join(" · ");
  });
  try {
    await knowHead(control.signal);
    const call = callFor([...before, asked], settings.read(turnTokens + mostTokens(text)), isChat());
    for await (const part of streamAnswer(call, control.signal)) {
      if (part.text !== "") pace.count();
      said += part.text;
      usage = part.usage ?? usage;
      if (part.finish === "length") outcome = "ended by the limit of tokens";
      drawing.soon();
    }
  } catch (error) {
    failed = !control.signal.aborted;
    if (!failed) outcome = "stopped";
    else fail(answer, error, () => again(text, question, answer));
  }
  if (said === "" && outcome === "" && !failed) outcome = "no text";
  drawing.now();
  if (turns === before && said !== "" && !failed) {
    turns = [...before, asked, { role: "assistant", text: said }];
    turnTokens = usage?.total_tokens ?? turnTokens + mostTokens(text) + pace.parts;
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

function fail(answer: TurnView, error: unknown, retry: () => void): void {
  const isRefusal = error instanceof Refusal;
  const message = error instanceof Error ? error.message : String(error);
  answer.showProblem(message, isRefusal ? error.code : "page", retry);
  if (!isRefusal) console.error(error); // a bug of the page
}

/** In place of what failed, in the conversation as it is now. */
function again(text: string, question: TurnView, answer: TurnView): void {
  if (running) return;
  question.element.remove();
  answer.element.remove();
  void say(text);
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
