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

export const hideTip = () => (find("tip").hidden = true);

function tell(lines, x, y) {
  const tip = find("tip");
  tip.replaceChildren(...lines.map((line, index) => make(index ? "div" : "strong", "", line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, y - box.height - 12)}px`;
}

const STEPS = { ArrowLeft: -0.02, ArrowRight: 0.02, PageUp: -0.2, PageDown: 0.2, Home: -1, End: 1 };

/**
 * A picture of time that can be read at any moment: under the pointer, or where the arrow keys have moved to.
 * `explain` gives the lines for a share of the width, and nothing where there is nothing to tell.
 */
export function readable(element, label, explain) {
  let share = 1;
  const show = (x, y) => {
    const lines = explain(share) ?? [];
    if (lines.length) tell(lines, x, y);
    else hideTip();
    element.setAttribute("aria-valuenow", Math.round(100 * share));
    element.setAttribute("aria-valuetext", lines.join(", ") || "nothing");
  };
  const attributes = { role: "slider", tabindex: 0, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 100 };
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.addEventListener("pointermove", (event) => {
    const box = element.getBoundingClientRect();
    share = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    show(event.clientX, event.clientY);
  });
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return void hideTip();
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    share = Math.max(0, Math.min(1, share + STEPS[event.key]));
    const box = element.getBoundingClientRect();
    show(box.left + share * box.width, box.top);
  });
  for (const kind of ["pointerleave", "blur"]) element.addEventListener(kind, hideTip);
}
