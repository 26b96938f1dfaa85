// The dialog of settings, which are kept as they are typed.

import { savedSettings, saveSettings } from "./store.js";
import { $ } from "./view.js";

const form = $("settings").querySelector("form");

// `wrong` is what the server says of the key.
export function openSettings(field = "temperature", wrong = "") {
  const given = savedSettings();
  for (const input of named()) input.value = given[input.name] ?? "";
  if (!$("settings").open) $("settings").showModal();
  showWrong(wrong);
  form.elements[field].focus();
}

function named() {
  return [...form.elements].filter((element) => element.name);
}

function showWrong(words) {
  $("key-wrong").textContent = words;
  $("key-wrong").hidden = !words;
  form.elements.key.ariaInvalid = String(Boolean(words));
}

form.elements.key.addEventListener("input", () => showWrong(""));
form.addEventListener("input", () => {
  const given = savedSettings();
  for (const input of named()) {
    if (input.checkValidity()) given[input.name] = input.value;
  }
  saveSettings(given);
});
