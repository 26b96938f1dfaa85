// Markdown as the server reads it, made into elements one by one: text is set as text here too.

// Nodes are texts, or {tag, children} with the href of a link, the start of a list, a cell's align.
export function built(nodes) {
  const fragment = document.createDocumentFragment();
  fragment.append(...nodes.map((node) => (typeof node === "string" ? node : element(node))));
  return fragment;
}

function element({ tag, children, href, start, align }) {
  const made = document.createElement(tag);
  made.append(built(children));
  if (href) {
    if (!made.textContent) made.textContent = href;
    Object.assign(made, { href, title: href, target: "_blank" });
    made.rel = "noopener noreferrer nofollow";
  }
  if (start !== undefined) made.start = start;
  if (align) made.style.textAlign = align;
  if (tag !== "table") return made;
  // a wide one is scrolled by itself
  const scrolled = document.createElement("div");
  scrolled.className = "scrolled";
  scrolled.append(made);
  return scrolled;
}
