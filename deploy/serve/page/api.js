// The server's interface as the page uses it. What goes wrong is a Failure, in words for people.

export class Failure extends Error {
  // kind: "key", "busy", "long" (for the context), "lost" or "refused"
  constructor(words, kind) {
    super(words);
    this.kind = kind;
  }
}

export async function servedModel(key) {
  const response = await request("v1/models", { headers: headers(key) });
  const model = (await response.json()).data[0];
  const { members = [], plan = members, lossless = true } = model.polybasic ?? {};
  return { id: model.id, members, plan, lossless };
}

// The elements that a text in Markdown means, for `built` of markdown.js.
export async function readMarkdown(text, key) {
  return (await (await posted("markdown", { text }, key)).json()).elements;
}

// The parsed events of a streamed answer, in order.
export async function* streamed(asked, key, signal) {
  const response = await posted("v1/chat/completions", { ...asked, stream: true }, key, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Failure(sentence(event.error.message), "refused");
    yield event;
  }
  throw new Failure(LOST, "lost");
}

const LOST = "The connection was lost before the answer was complete.";
const NO_KEY = "This server asks for an API key. Enter it in the settings.";
const WRONG_KEY = "This server does not take the API key of the settings.";

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function posted(path, content, key, signal) {
  return request(path, {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(content),
    signal,
  });
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached. Is it running?", "lost");
  }
  if (!response.ok) throw await failureOf(response, "Authorization" in options.headers);
  return response;
}

async function failureOf(response, hadKey) {
  const said = await response.json().then((body) => body.error, () => undefined);
  switch (response.status) {
    case 401:
      return new Failure(hadKey ? WRONG_KEY : NO_KEY, "key");
    case 429:
    case 503: {
      const seconds = Number(response.headers.get("Retry-After"));
      const when = seconds > 0 ? ` in ${seconds} ${seconds === 1 ? "second" : "seconds"}` : " soon";
      return new Failure(`The server is busy. Please send it again${when}.`, "busy");
    }
  }
  if (response.status >= 500) {
    return new Failure(`The server failed (${response.status}); its log says why.`, "refused");
  }
  const kind = said?.code === "context_length_exceeded" ? "long" : "refused";
  return new Failure(sentence(said?.message ?? `refused (${response.status})`), kind);
}

// What a server says is for programs too, and begins with a small letter.
function sentence(said) {
  return `${said[0].toUpperCase()}${said.slice(1)}${/[.?!]$/.test(said) ? "" : "."}`;
}

// The data of each server-sent event. Its lines may end in any of the three ways there are.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r\n\r\n|\n\n|\r\r/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part
          .split(/\r\n|\n|\r/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, ""));
        if (data.length) yield data.join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(LOST, "lost");
  } finally {
    reader.cancel().catch(() => {});
  }
}
