// What the browser keeps: the conversation and the settings; the key only as long as the tab.

import { areCalls } from "./calls.js";

const MAX_CHARACTERS = 1_000_000; // of the conversation; browsers have room for some millions
const CONVERSATION = "polybasic.conversation";
const SETTINGS = "polybasic.settings";
const KEY = "polybasic.key";

// Turns are {role, text}; answers also have tokens ([text, member] each), calls, and their cost.
export function savedConversation() {
  const turns = read("localStorage", CONVERSATION);
  const isTurn = (turn) =>
    ["user", "assistant"].includes(turn?.role) &&
    typeof turn.text === "string" &&
    (turn.tokens === undefined || Array.isArray(turn.tokens)) &&
    (turn.calls === undefined || areCalls(turn.calls));
  return Array.isArray(turns) && turns.every(isTurn) ? turns : [];
}

// The oldest answers lose their tints first, and then the oldest turns go, until the rest fits.
export function saveConversation(turns) {
  const kept = turns.map((turn) => JSON.stringify(turn));
  let first = 0;
  const size = () => kept.slice(first).reduce((sum, one) => sum + one.length + 1, 1);
  const isTooLong = () => size() > MAX_CHARACTERS;
  for (let index = 0; index < kept.length && isTooLong(); index++) {
    kept[index] = JSON.stringify({ ...turns[index], tokens: undefined });
  }
  while (isTooLong()) first = nextQuestion(turns, first);
  write("localStorage", CONVERSATION, `[${kept.slice(first)}]`);
}

// The place of the next question after that of a turn, or else of the end.
export function nextQuestion(turns, place) {
  const found = turns.findIndex((turn, index) => index > place && turn.role === "user");
  return found < 0 ? turns.length : found;
}

export function savedSettings() {
  return { ...read("localStorage", SETTINGS), key: read("sessionStorage", KEY) ?? "" };
}

export function saveSettings({ key, ...others }) {
  write("sessionStorage", KEY, JSON.stringify(key));
  write("localStorage", SETTINGS, JSON.stringify(others));
}

function read(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(name));
  } catch (error) {
    console.warn(`${name} cannot be read: ${error.message}`); // forbidden, or written by another
    return null;
  }
}

function write(storage, name, text) {
  try {
    window[storage].setItem(name, text);
  } catch (error) {
    console.warn(`${name} is not kept over a reload: ${error.message}`); // forbidden, or no room
  }
}
