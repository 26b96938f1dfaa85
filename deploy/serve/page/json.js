// What is written in JSON: answers, arguments of calls, and settings.

const PARTS = /"(?:[^"\\]+|\\.)*"|[{[]\s*[}\]]|[{}[\],:]|[^\s"{}[\],:]+/g;
const STEPS = { "{": 1, "[": 1, "}": -1, "]": -1 };
const DEEPEST = 32; // that lines are indented

// What a text says; nothing where it is empty.
export function parsed(text = "") {
  return text.trim() ? JSON.parse(text) : undefined;
}

export function isReadable(text, read = parsed) {
  try {
    read(text);
    return true;
  } catch {
    return false;
  }
}

// As the server takes it, of the settings.
export function responseFormat({ format, schema }) {
  if (format !== "json_schema") return format ? { type: format } : undefined;
  return { type: format, json_schema: { schema: parsed(schema) } };
}

// JSON with a line for each of its values, all of which stay as they are written.
export function indented(text) {
  JSON.parse(text);
  let depth = 0;
  const line = () => `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
  const spaced = (part) => {
    if (part === ":") return ": ";
    const step = STEPS[part] ?? 0;
    depth += step;
    if (step < 0) return line() + part;
    return step > 0 || part === "," ? part + line() : part;
  };
  return text.match(PARTS).map(spaced).join("");
}
