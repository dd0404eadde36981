// Helpers for elements. Text is never read as HTML: an adapter's name is a user's input.

export const find = (id) => document.getElementById(id);

export function make(tag, className = "", ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

/** Writes only changed text, so that nothing flickers and a selection stays. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function tell(tip, lines, x, y) {
  tip.replaceChildren(...lines.map((line, index) => make(index ? "div" : "strong", "", line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, y - box.height - 12)}px`;
}
