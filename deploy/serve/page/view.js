// The page's elements. Text of people, models and servers is set as text, never as markup.

import { said } from "./calls.js";
import { indented, isReadable } from "./json.js";
import { built } from "./markdown.js";

export const $ = (id) => document.getElementById(id);

// Who proposes tokens and is no member.
const OTHERS = new Map([
  ["ngram", "copied from the text"],
  ["grammar", "foretold by the grammar"],
  ["history", "copied from earlier answers"],
]);
const ENDS = { length: "cut at the limit of tokens", stopped: "stopped", lost: "incomplete" };

// A turn of the conversation as an element.
export class TurnView {
  constructor(turn, members) {
    this.element = $("turn").content.firstElementChild.cloneNode(true);
    this.element.classList.add(turn.role);
    this.find("h3").textContent = turn.role === "user" ? "You" : "Answer";
    this.find("footer").hidden = turn.role === "user";
    this.rest = this.find(".text").appendChild(new Text());
    this.length = 0;
    this.append(turn.tokens ?? [], turn.text, members);
    this.showCalls(turn);
    this.showCost(turn);
    $("conversation").append(this.element);
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  // New tokens, and the whole text so far: what of it is no token's yet stands behind them.
  append(tokens, text, members) {
    for (const [part, member] of tokens) {
      const element = document.createElement("span");
      element.textContent = part;
      element.className = `token ${lookOf(member, members)}`;
      element.dataset.member = member;
      this.rest.before(element);
      this.length += part.length;
    }
    this.rest.data = text.slice(this.length);
  }

  // Offer the answer formatted, unless its Markdown is nothing but paragraphs, beside no calls.
  format(nodes, asTokens) {
    const formatted = built(nodes);
    if (!formatted.querySelector(":not(p, br)") && this.find(".calls").hidden) return;
    this.find(".formatted").replaceChildren(formatted);
    this.find(".form").hidden = false;
    this.show(asTokens);
  }

  show(asTokens) {
    if (this.find(".form").hidden) return;
    this.find(".formatted").hidden = asTokens;
    this.find(".text").hidden = !asTokens;
    this.find(".form").textContent = asTokens ? "Show formatted" : "Show tokens";
  }

  // Each call with a field, which writes the result into it.
  showCalls({ calls = [] }) {
    this.find(".calls").hidden = !calls.length;
    this.find(".calls button").before(...calls.map(shownCall));
  }

  // Whether results can be written yet.
  openCalls(isOpen) {
    this.find(".calls button").hidden = !isOpen;
    for (const field of this.element.querySelectorAll("textarea")) field.readOnly = !isOpen;
  }

  // What a button says that repeats the answer; false: there is none.
  offerRepeat(words) {
    this.find(".repeat").hidden = !words;
    this.find(".repeat").textContent = words || "";
  }

  // While an answer comes there is nothing to copy or repeat yet.
  setBusy(isBusy) {
    this.element.classList.toggle("busy", isBusy);
    this.find("footer").hidden = isBusy;
  }

  showCost(turn) {
    const { role, end, rate, length, isAlone, other } = turn;
    if (role === "user") return;
    const parts = [];
    if (rate) parts.push(`${shownRate(rate)} tokens a second`);
    if (isAlone) parts.push("target alone");
    else if (length) parts.push(`${length.toFixed(2)} tokens for each pass of the target`);
    if (ENDS[end]) parts.push(ENDS[end]);
    if (other && rate) {
      const which = other.isAlone ? "the target alone" : "all members";
      const same = said(turn) === other.text ? "with the same text" : "with another text";
      parts.push(`${(rate / other.rate).toFixed(2)} times as fast as ${which}, ${same}`);
    }
    this.find(".cost").textContent = parts.join(" · ");
  }
}

function shownCall(call) {
  const element = $("call").content.firstElementChild.cloneNode(true);
  const { name, arguments: given } = call.function;
  for (const place of element.querySelectorAll(".name")) place.textContent = name;
  const [code, field] = ["pre code", "textarea"].map((one) => element.querySelector(one));
  code.textContent = isReadable(given, indented) ? indented(given) : given;
  code.id = `arguments-of-${call.id}`;
  field.setAttribute("aria-describedby", code.id);
  field.value = call.result ?? "";
  field.addEventListener("input", () => {
    call.result = field.value;
  });
  return element;
}

export function shownRate(rate) {
  return rate < 10 ? rate.toFixed(1) : String(Math.round(rate));
}

// Who proposes tokens, and how many of an answer's; counts are by member.
export function showLegend({ members, plan }, counts) {
  $("legend").replaceChildren(
    ...withCounts([...members, ...OTHERS.keys()], plan, counts).map((member) => {
      const [row, sample, count] = made("li", "span", "span");
      sample.className = `token ${lookOf(member, members)}`;
      sample.textContent = OTHERS.get(member) ?? member;
      count.textContent = counts[member] ?? "";
      count.className = "count";
      row.append(sample, member === members[0] ? " drew it itself" : "", count);
      return row;
    }),
  );
}

// How often each member ran.
export function showPasses({ members, plan }, passes) {
  const most = Math.max(1, ...Object.values(passes));
  $("passes").replaceChildren(
    ...withCounts(members, plan, passes).map((member) => {
      const [row, name, value] = made("div", "dt", "dd");
      name.textContent = member;
      value.textContent = passes[member] ?? "–";
      row.style.setProperty("--share", `${(100 * (passes[member] ?? 0)) / most}%`);
      row.append(name, value);
      return row;
    }),
  );
}

// Members of the plan, and others that something was counted of.
function withCounts(members, plan, counts) {
  return members.filter((member) => plan.includes(member) || counts[member]);
}

function made(...tags) {
  return tags.map((tag) => document.createElement(tag));
}

// The class that tints and underlines a member's tokens; more than four members repeat the looks.
function lookOf(member, members) {
  if (OTHERS.has(member)) return member;
  const place = members.indexOf(member);
  return place === 0 ? "target" : `proposer${place < 0 ? 1 : ((place - 1) % 3) + 1}`;
}
