// Tools that the model may call, and the calls in its answers, whose results the user writes.

import { parsed } from "./json.js";

// Of a text that lists them as OpenAI does, or their functions alone; throws where it does neither.
export function toolsOf(text) {
  return parsed(text)?.map((tool) => {
    const { type, ...bare } = tool;
    const told = tool.function ? tool : { type: "function", function: bare };
    if (typeof told.function.name !== "string") throw new TypeError("a function has no name");
    return told;
  });
}

// Calls are OpenAI's, with the result as far as it is written.
export function areCalls(calls) {
  const isText = (one) => typeof one === "string";
  return (
    Array.isArray(calls) &&
    calls.every((call) => {
      const { name, arguments: given } = call?.function ?? {};
      return [call?.id, name, given, call?.result ?? ""].every(isText);
    })
  );
}

// A turn as the server takes it: calls are followed by their results, so that none is without.
export function messagesOf({ role, text, calls = [] }) {
  const asked = calls.map(({ result, ...call }) => call);
  const results = calls.map(({ id, result = "" }) => {
    return { role: "tool", tool_call_id: id, content: result };
  });
  return [{ role, content: text, ...(asked.length && { tool_calls: asked }) }, ...results];
}

// All that an answer says, its calls too.
export function said({ text, calls = [] }) {
  const called = calls.map((call) => `${call.function.name}(${call.function.arguments})`);
  return [text, ...called].filter(Boolean).join("\n");
}
