// The dialog of settings, which are kept as they are typed.

import { toolsOf } from "./calls.js";
import { isReadable, parsed } from "./json.js";
import { savedSettings, saveSettings } from "./store.js";
import { $ } from "./view.js";

const form = $("settings").querySelector("form");
const CHECKS = {
  schema: [parsed, "This is not JSON, so it is not kept."],
  tools: [toolsOf, "This is not a JSON list of functions, so it is not kept."],
};

// `wrong` is what the server says of the key.
export function openSettings(field = "temperature", wrong = "") {
  const given = savedSettings();
  for (const input of named()) input.value = given[input.name] ?? "";
  check();
  if (!$("settings").open) $("settings").showModal();
  form.elements[field].focus();
  showWrong("key", wrong);
}

function named() {
  return [...form.elements].filter((element) => element.name);
}

// The fields in JSON; a schema is one only of answers that have it.
function check() {
  const { format, schema } = form.elements;
  schema.disabled = format.value !== "json_schema";
  $("schema").hidden = schema.disabled;
  for (const [name, [read, words]] of Object.entries(CHECKS)) {
    const wrong = isReadable(form.elements[name].value, read) ? "" : words;
    form.elements[name].setCustomValidity(wrong);
    showWrong(name, wrong);
  }
}

function showWrong(name, words) {
  const told = $(`${name}-wrong`);
  if (told.textContent === words) return; // a screen reader tells it once
  told.textContent = words;
  told.hidden = !words;
  form.elements[name].ariaInvalid = String(Boolean(words));
  if (words) told.scrollIntoView({ block: "nearest" });
}

form.elements.key.addEventListener("input", () => showWrong("key", ""));
form.addEventListener("input", () => {
  check();
  const given = savedSettings();
  for (const input of named()) {
    if (!input.disabled && input.checkValidity()) given[input.name] = input.value;
  }
  saveSettings(given);
});
