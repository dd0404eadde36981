// The prompt box asks any adapter, and another one beside it, and shows both answers as they come.

import { find, make, write } from "./dom.js";
import { count, seconds } from "./format.js";
import { reasonIn, withKey } from "./live.js";

export class Ask {
  constructor() {
    this.form = find("ask-form");
    this.panes = [];
    this.names = "";
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    find("ask-stop").addEventListener("click", () => this.stop());
  }

  /** From a row of the table of adapters. */
  choose(name) {
    const { first, second, prompt } = this.form.elements;
    if (first.value && first.value !== name && !second.value) second.value = first.value;
    first.value = name;
    find("ask").scrollIntoView({ block: "nearest" });
    prompt.focus();
  }

  show(frame) {
    find("ask").hidden = frame.phase === "replay";
    const names = frame.adapters.filter((row) => row.is_loaded).map((row) => (row.is_current ? row.name : `${row.name}@${row.version}`));
    if (names.join("\n") !== this.names) {
      this.names = names.join("\n");
      find("names").replaceChildren(...names.map((name) => Object.assign(make("option"), { value: name })));
      if (!this.form.elements.first.value) this.form.elements.first.value = names[1] ?? names[0] ?? "";
    }
    // Until its first token, an answer says what it waits for.
    for (const pane of this.panes) {
      const row = pane.isWaiting && frame.requests.find((one) => one.name.endsWith(pane.id));
      if (row) write(pane.figures, row.reason ? `waits: ${row.reason}` : row.state);
    }
  }

  ask() {
    this.stop();
    const { prompt, first, second, tokens, temperature, plain } = this.form.elements;
    const names = [first.value.trim(), second.value.trim()].filter(Boolean);
    const body = { max_tokens: Number(tokens.value), temperature: Number(temperature.value), stream: true, stream_options: { include_usage: true } };
    const text = plain.checked ? { prompt: prompt.value } : { messages: [{ role: "user", content: prompt.value }] };
    this.abort = new AbortController();
    this.panes = names.map((name) => this.paneOf(name));
    find("answers").replaceChildren(...this.panes.map((pane) => pane.element));
    find("ask-stop").hidden = false;
    const route = plain.checked ? "v1/completions" : "v1/chat/completions";
    Promise.all(this.panes.map((pane) => this.follow(pane, route, { ...body, ...text, model: pane.name }))).then(() => {
      find("ask-stop").hidden = !this.panes.some((pane) => pane.isOpen);
    });
  }

  stop() {
    this.abort?.abort();
    find("ask-stop").hidden = true;
  }

  paneOf(name) {
    const pane = { name, id: `dashboard-${crypto.getRandomValues(new Uint32Array(2)).join("")}`, isWaiting: true, isOpen: true };
    pane.answer = make("p", "answer");
    pane.answer.setAttribute("aria-live", "polite");
    pane.figures = make("span", "muted small", "asked");
    pane.element = make("article", "pane", make("div", "title", make("h3", "", name), pane.figures), pane.answer);
    pane.element.setAttribute("aria-label", `The answer of ${name}`);
    return pane;
  }

  async follow(pane, route, body) {
    const { signal } = this.abort;
    const askedAt = performance.now();
    let firstAt = null;
    let tokens = 0;
    try {
      const headers = withKey({ "Content-Type": "application/json", "X-Request-Id": pane.id });
      const reply = await fetch(route, { method: "POST", headers, body: JSON.stringify(body), signal });
      if (!reply.ok) throw new Error(await reasonIn(reply));
      for await (const said of packets(reply)) {
        if (said.error) throw new Error(said.error.message);
        const [choice] = said.choices;
        const text = choice?.text ?? [choice?.delta?.reasoning_content, choice?.delta?.content].filter(Boolean).join("");
        if (text) {
          firstAt ??= performance.now();
          pane.isWaiting = false;
          pane.answer.append(text);
        }
        tokens = said.usage?.completion_tokens ?? tokens;
        if (firstAt) write(pane.figures, `first token ${seconds((firstAt - askedAt) / 1000)}`);
      }
      const lasted = (performance.now() - (firstAt ?? askedAt)) / 1000;
      const rate = tokens > 1 && firstAt ? ` · ${count((tokens - 1) / lasted)} tokens/s` : "";
      write(pane.figures, `${firstAt ? `first token ${seconds((firstAt - askedAt) / 1000)}` : "no text"} · ${count(tokens)} tokens${rate}`);
    } catch (error) {
      const reason = error instanceof TypeError ? "The server does not answer." : error.message;
      write(pane.figures, signal.aborted ? "stopped" : reason);
      pane.figures.classList.toggle("bad", !signal.aborted);
    }
    pane.isWaiting = pane.isOpen = false;
  }
}

/** What a stream of server-sent events carries, as JSON. */
async function* packets(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}
