// The conversation: what is asked, what comes, and what the browser keeps of it.

import { Failure, readMarkdown, servedModel, streamed } from "./api.js";
import { messagesOf, said, toolsOf } from "./calls.js";
import { indented, responseFormat } from "./json.js";
import { Pace } from "./pace.js";
import {
  nextQuestion,
  saveConversation,
  savedConversation,
  savedSettings,
  saveSettings,
} from "./store.js";
import { openSettings } from "./settings.js";
import { $, showLegend, showPasses, shownRate, TurnView } from "./view.js";

let model = { id: "", members: [], plan: [], lossless: true };
let turns = savedConversation();
let views = [];
const meant = new WeakMap(); // of turns: the elements that their texts mean
let numForgotten = 0; // turns at the beginning that are no longer sent
let refusedKey = null; // by the server, the last time
let running = null; // an AbortController while an answer comes
let answering = Promise.resolve(); // until the last answer is settled

async function connect() {
  try {
    model = await servedModel(savedSettings().key);
  } catch (error) {
    report(error);
    return;
  }
  refusedKey = null;
  notify("");
  $("model").textContent = model.id;
  $("lossy").hidden = $("stray").hidden = model.lossless;
  $("keep").hidden = !model.lossless;
  $("alone").disabled = model.members.length < 2;
  if (!running) showTurns(); // or an answer would go on out of sight
}

function showTurns() {
  views.forEach((view) => view.element.remove());
  views = turns.map((turn) => new TurnView(turn, model.members));
  showEnd();
  $("conversation").scrollTop = $("conversation").scrollHeight;
  if (model.id) formatAll();
}

// Answers as they are meant, the last ones first.
async function formatAll() {
  const shown = turns.map((turn, index) => [turn, views[index]]);
  for (const [turn, view] of shown.reverse()) {
    if (turn.role === "assistant" && view.element.isConnected) await format(turn, view);
  }
}

async function format(turn, view) {
  try {
    if (!meant.has(turn)) meant.set(turn, await elementsOf(turn));
  } catch (error) {
    console.warn(`an answer is shown as it is: ${error.message}`); // too long, cut, or no server
    return;
  }
  keepingEnd(() => view.format(meant.get(turn), Boolean(savedSettings().asTokens)));
}

async function elementsOf({ text, isJson }) {
  if (!text) return [];
  if (!isJson) return readMarkdown(text, savedSettings().key);
  return [{ tag: "pre", children: [{ tag: "code", children: [indented(text)] }] }];
}

// All answers from tokens to what is formatted, or back.
function switchForm() {
  const given = savedSettings();
  const asTokens = !given.asTokens;
  saveSettings({ ...given, asTokens });
  keepingEnd(() => views.forEach((view) => view.show(asTokens)));
}

// The figures of the last answer, which can be given again by the other members, to compare.
function showEnd() {
  const last = turns.at(-1);
  $("welcome").hidden = turns.length > 0;
  showFigures(last);
  views.forEach((view, index) => {
    const others = last?.isAlone ? "all members" : "target alone";
    const isLast = turns[index] === last && model.members.length > 1;
    view.offerRepeat(isLast && `Repeat with ${others}`);
    view.openCalls(turns[index] === last);
  });
}

function showFigures(turn, rate = turn?.rate) {
  const counts = {};
  for (const [, member] of turn?.tokens ?? []) counts[member] = (counts[member] ?? 0) + 1;
  const length = turn?.length ?? turn?.tokens?.length / turn?.passes?.[model.members[0]];
  $("rate").textContent = rate ? shownRate(rate) : "–";
  $("length").textContent = Number.isFinite(length) ? length.toFixed(2) : "–";
  $("tokens").textContent = turn?.tokens?.length || "–";
  showPasses(model, turn?.passes ?? {});
  showLegend(model, counts);
}

function notify(words) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
}

function report(error) {
  const isForeseen = error instanceof Failure;
  if (!isForeseen) console.error(error);
  notify(isForeseen ? error.message : `This page has failed: ${error.message}`);
  if (error.kind === "key") {
    refusedKey = savedSettings().key;
    openSettings("key", error.message);
  }
}

// For a screen reader, which gets an answer whole and not token by token.
function say(words) {
  $("status").textContent = words;
}

// A question, or else nothing but the results of the last answer's calls.
async function send(question) {
  if (running) return;
  notify("");
  if (!model.id) await connect();
  if (!model.id || running) return;
  if (question) {
    turns.push({ role: "user", text: question });
    views.push(new TurnView(turns.at(-1), model.members));
    $("question").value = "";
    fitQuestion();
  }
  answering = answer($("alone").checked);
}

function repeat() {
  if (running) return;
  notify("");
  const other = turns.pop();
  views.pop().element.remove();
  answering = answer(!other.isAlone, other);
}

function requested(isAlone, seed) {
  const given = savedSettings();
  const number = (name) => (given[name] ? Number(given[name]) : undefined);
  const draws = model.lossless || isAlone;
  // one that is known, so that the answer can be repeated
  const known = seed ?? number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  return {
    model: model.id,
    temperature: draws ? number("temperature") : 0,
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    response_format: responseFormat(given),
    tools: toolsOf(given.tools),
    seed: draws ? known : undefined,
    polybasic: { members: true, ...(isAlone && { run: model.members.slice(0, 1) }) },
  };
}

// The events of the last turn, without the oldest ones where the context has no room for them.
async function* fitting(asked, signal) {
  const { system, key } = savedSettings();
  const first = system ? [{ role: "system", content: system }] : [];
  for (let forgotten = numForgotten; ; forgotten = nextQuestion(turns, forgotten)) {
    const sent = turns.slice(forgotten, -1).flatMap(messagesOf);
    const request = { ...asked, messages: [...first, ...sent] };
    try {
      for await (const event of streamed(request, key, signal)) {
        if (forgotten > numForgotten) {
          numForgotten = forgotten;
          const which = `its first ${forgotten} turns are no longer sent`;
          notify(`The conversation is too long for the context: ${which}.`);
        }
        yield event;
      }
      return;
    } catch (error) {
      const isLast = nextQuestion(turns, forgotten) === turns.length;
      if (error.kind !== "long" || isLast) throw error;
    }
  }
}

// Ask for the answer to all turns so far; `other` is the answer whose place it takes.
async function answer(isAlone, other) {
  const asked = requested(isAlone, other?.seed);
  const { seed } = asked;
  const isJson = Boolean(asked.response_format);
  const turn = { role: "assistant", text: "", tokens: [], isAlone, isJson, seed, end: "stopped" };
  const view = new TurnView(turn, model.members);
  const pace = new Pace();
  const painter = new Painter(view, turn, () => showFigures(turn, pace.now()));
  turns.push(turn);
  views.push(view);
  showEnd();
  setRunning(new AbortController(), view);
  try {
    for await (const event of fitting(asked, running.signal)) {
      const tokens = take(event, turn);
      pace.count(tokens.length);
      painter.add(tokens);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      turn.end = "lost";
      report(error);
    }
  }
  turn.rate ??= pace.overall();
  painter.finish();
  keepingEnd(() => setRunning(null, view));
  settle(turn, view, other);
}

// Add an event of the stream to an answer; its new tokens.
function take(event, turn) {
  const [choice] = event.choices;
  const tokens = (event.polybasic?.tokens ?? []).map(({ text, member }) => [text, member]);
  turn.text += choice?.delta?.content ?? "";
  turn.tokens.push(...tokens);
  if (choice?.delta?.tool_calls) turn.calls = [...(turn.calls ?? []), ...choice.delta.tool_calls];
  turn.end = choice?.finish_reason ?? turn.end;
  turn.passes = event.polybasic?.passes ?? turn.passes;
  if (event.timings) {
    turn.length = event.polybasic.accepted_length;
    turn.rate = event.timings.predicted_per_second;
  }
  return tokens;
}

// Keep an answer, or else give back what it was to take the place of, or the question.
function settle(turn, view, other) {
  const isComplete = ({ end }) => ["stop", "length", "tool_calls"].includes(end);
  if (said(turn) || isComplete(turn)) {
    if (other && isComplete(other) && isComplete(turn)) {
      turn.other = { isAlone: other.isAlone, rate: other.rate, text: said(other) };
    }
    keepingEnd(() => {
      view.showCalls(turn);
      view.showCost(turn);
    });
    showEnd();
    format(turn, view);
    say(`${turn.end === "stopped" ? "Stopped. " : ""}${said(turn)}`);
  } else {
    turns.pop();
    if (other) turns.push(other);
    takeBack();
    showTurns();
  }
  saveConversation(turns);
}

// A question without an answer, or one that was begun, is there to be sent.
function takeBack() {
  if (turns.at(-1)?.role !== "user") return;
  const begun = $("question").value;
  $("question").value = [turns.pop().text, begun].filter(Boolean).join("\n");
  fitQuestion();
}

function setRunning(controller, view) {
  running = controller;
  view.setBusy(Boolean(controller));
  const [shown, hidden] = controller ? ["stop", "send"] : ["send", "stop"];
  const hadFocus = document.activeElement === $(hidden);
  $(shown).hidden = false;
  $(hidden).hidden = true;
  if (hadFocus) $(controller ? "stop" : "question").focus();
  if (controller) say("The answer is coming.");
}

// Draws new tokens once a frame, however many events there are.
class Painter {
  constructor(view, turn, painted) {
    this.view = view;
    this.turn = turn;
    this.painted = painted;
    this.waiting = [];
    this.frame = 0;
  }

  add(tokens) {
    this.waiting.push(...tokens);
    this.frame ||= requestAnimationFrame(() => this.finish());
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    keepingEnd(() => this.view.append(this.waiting, this.turn.text, model.members));
    this.waiting = [];
    this.painted();
  }
}

// Who sees the end of the conversation sees it when it has grown, too.
function keepingEnd(grow) {
  const log = $("conversation");
  const wasAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  grow();
  if (wasAtEnd) log.scrollTop = log.scrollHeight;
}

function fitQuestion() {
  const { style } = $("question");
  style.height = "auto";
  style.height = `${$("question").scrollHeight + 2}px`; // with its borders
}

async function startAnew() {
  running?.abort();
  await answering;
  turns = [];
  numForgotten = 0;
  saveConversation(turns);
  showTurns();
  notify("");
  say("New conversation.");
  $("question").focus();
}

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    // without TLS browsers have only the older way
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied.");
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (question) send(question);
});
$("question").addEventListener("input", fitQuestion);
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) running?.abort();
});
$("conversation").addEventListener("click", ({ target }) => {
  const index = views.findIndex((view) => view.element.contains(target));
  if (target.matches(".copy")) copy(said(turns[index]));
  if (target.matches(".form")) switchForm();
  if (target.matches(".repeat")) repeat();
});
$("conversation").addEventListener("submit", (event) => {
  event.preventDefault();
  $("send").focus(); // before the form's own button goes away
  send();
});
$("conversation").addEventListener("pointerover", ({ target }) => {
  if (target.dataset.member) target.title = target.dataset.member;
});
$("tinted").addEventListener("change", () => {
  $("conversation").classList.toggle("plain", !$("tinted").checked);
});
$("fresh").addEventListener("click", startAnew);
$("open-settings").addEventListener("click", () => openSettings());
$("settings").addEventListener("close", () => {
  if (!running && savedSettings().key !== refusedKey) connect();
});
addEventListener("pagehide", () => {
  const kept = turns.filter((turn) => said(turn) || turn.end !== "stopped");
  const text = $("question").value;
  if (text && kept.at(-1)?.role !== "user") kept.push({ role: "user", text });
  saveConversation(kept);
});

$("by-member").open = matchMedia("(min-width: 60rem)").matches;
takeBack();
showTurns();
connect();
