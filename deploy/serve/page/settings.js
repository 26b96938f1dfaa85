// The dialog of settings, which are kept as they are typed.

import { savedSettings, saveSettings } from "./store.js";
import { $ } from "./view.js";

const form = $("settings").querySelector("form");

export function openSettings(field = "temperature") {
  const given = savedSettings();
  for (const input of named()) input.value = given[input.name] ?? "";
  if (!$("settings").open) $("settings").showModal();
  form.elements[field].focus();
}

function named() {
  return [...form.elements].filter((element) => element.name);
}

form.addEventListener("input", () => {
  const given = savedSettings();
  for (const input of named()) {
    if (input.checkValidity()) given[input.name] = input.value;
  }
  saveSettings(given);
});
