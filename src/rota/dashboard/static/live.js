// Live data comes as server-sent events, read with fetch because an EventSource cannot send a key.

const SILENCE_MS = 4000;
const PAUSES_S = [1, 2, 4, 8];

export const key = {
  get: () => sessionStorage.getItem("rota-key") ?? "",
  set: (value) => sessionStorage.setItem("rota-key", value),
};

export function withKey(headers = {}) {
  return key.get() ? { ...headers, Authorization: `Bearer ${key.get()}` } : headers;
}

/** Whether the call succeeded, and the server's message, if there is one. */
export async function post(route, body) {
  try {
    const headers = withKey({ "Content-Type": "application/json" });
    const reply = await fetch(route, { method: "POST", headers, body: JSON.stringify(body) });
    const said = await reply.json().catch(() => ({}));
    const isDone = reply.ok && said.success !== false;
    const message = said.error_message ?? said.error?.message ?? (isDone ? null : `The server answered ${reply.status}.`);
    return { isDone, message };
  } catch {
    return { isDone: false, message: "The server does not answer." };
  }
}

export async function reasonIn(reply) {
  const said = await reply.json().catch(() => null);
  return said?.error?.message ?? `The server answered ${reply.status}.`;
}

/** Follows the server until it is stopped. While the page is hidden it does not follow. */
export class Live {
  constructor({ onFrame, onLost, onRefused }) {
    Object.assign(this, { onFrame, onLost, onRefused, isWanted: false, failures: 0, windowS: 60 });
    document.addEventListener("visibilitychange", () => this.isWanted && this.restart());
  }

  start() {
    this.isWanted = true;
    this.restart();
  }

  stop() {
    this.isWanted = false;
    this.restart();
  }

  /** Figures and charts of another time. */
  look(windowS) {
    this.windowS = windowS;
    this.restart();
  }

  restart() {
    this.abort?.abort();
    clearTimeout(this.retry);
    if (this.isWanted && !document.hidden) this.follow();
  }

  async follow() {
    const abort = (this.abort = new AbortController());
    let watchdog;
    try {
      const reply = await fetch(`dashboard/events?window=${this.windowS}`, { headers: withKey(), signal: abort.signal, cache: "no-store" });
      if (reply.status === 401 || reply.status === 403) return this.onRefused(await reasonIn(reply));
      if (!reply.ok) throw new Error(await reasonIn(reply));
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => reader.cancel(), SILENCE_MS);
        const { value, done } = await reader.read();
        if (done) throw new Error("The server does not answer.");
        const packets = (text + value).split("\n\n");
        text = packets.pop();
        for (const packet of packets) if (packet.startsWith("data: ")) this.onFrame(JSON.parse(packet.slice(6)));
        this.failures = 0;
      }
    } catch (error) {
      if (abort.signal.aborted) return;
      const pause = PAUSES_S[Math.min(this.failures++, PAUSES_S.length - 1)];
      this.onLost(error instanceof TypeError ? "The server does not answer." : error.message, pause);
      this.retry = setTimeout(() => this.restart(), pause * 1000);
    } finally {
      clearTimeout(watchdog);
    }
  }
}
