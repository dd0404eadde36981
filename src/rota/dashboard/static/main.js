// The page gets frames from the server or from a journal, and shows both with the same views.

import { Adapters } from "./adapters.js";
import { Ask } from "./ask.js";
import { Charts } from "./chart.js";
import { theme } from "./colours.js";
import { find, write } from "./dom.js";
import { Figures } from "./figures.js";
import { Live, key, reasonIn, withKey } from "./live.js";
import { Player } from "./player.js";
import { Replicas } from "./replicas.js";
import { Requests } from "./requests.js";
import { Strip } from "./strip.js";
import { Tenants } from "./tenants.js";
import { Traffic } from "./traffic.js";
import { Trouble } from "./trouble.js";

const DRAW_MS = 40;
const FRAME_MS = 200;
// The strip runs this much behind, so that its right edge is already known and needs no later correction.
const LATE_S = 0.35;

const strip = new Strip();
const ask = new Ask();
const adapters = new Adapters((name) => ask.choose(name));
const views = [new Figures(), strip, new Charts(), new Replicas(), adapters, new Requests(), new Traffic(), new Tenants(), new Trouble(), ask];
let latest = null;
let version = null; // of the server that this page came from
let rows = new Map(); // of adapters: a frame has only those that changed
let offset = null; // the server's clock less this page's, in seconds

function show(frame) {
  if (frame.is_whole) rows = new Map();
  for (const row of frame.adapters) rows.set(row.id, row);
  for (const id of frame.gone) rows.delete(id);
  latest = { ...frame, adapters: [...rows.values()].sort((a, b) => a.id - b.id) };
  for (const view of views) view.show(latest);
  showState(latest);
}

function showState(frame) {
  showIdle(frame);
  document.title = frame.model ? `${frame.model} · Rota` : "Rota";
  write(find("model"), frame.model);
  write(find("span-name"), { 60: "the last minute", 300: "the last 5 minutes", 3600: "the last hour" }[frame.window_s]);
}

function showIdle(frame) {
  const isIdle = frame.phase === "ready" && !frame.engines.some((one) => one.is_paused) && !(frame.waiting + frame.running + frame.parked) && !frame.tokens_per_s;
  find("idle").hidden = !isIdle;
  if (!isIdle) return;
  const [words, example] = [find("idle").querySelector("p"), find("idle").querySelector("code")];
  const named = frame.adapters.find((row) => row.id !== 0);
  write(words, named
    ? "There are no requests now. Slots fill when a request names an adapter as its model, for example:"
    : "No adapter is loaded, and there are no requests now. The base model needs no slot:");
  const body = JSON.stringify({ model: (named ?? frame.adapters[0])?.name, prompt: "The sea is", max_tokens: 40 });
  const auth = key.get() ? " -H 'Authorization: Bearer …'" : "";
  write(example, `curl ${new URL("v1/completions", document.baseURI)} -H 'Content-Type: application/json'${auth} \\\n  -d '${body}'`);
}

function say(kind, status, banner = "") {
  find("status").dataset.kind = kind;
  write(find("status"), status);
  find("banner").hidden = !banner;
  find("banner").dataset.kind = kind;
  write(find("banner"), banner);
  find("content").classList.toggle("stale", kind === "bad");
}

const live = new Live({
  onFrame(frame) {
    version ??= frame.version;
    if (frame.version !== version) return void location.reload(); // the server was upgraded
    const measured = frame.now - performance.now() / 1000;
    // Frames arrive with random delays, so the clock follows them slowly and jumps only if it is far off.
    offset = offset === null || Math.abs(measured - offset) > 1 ? measured : offset + 0.1 * (measured - offset);
    find("key").hidden = true;
    find("content").hidden = false;
    show(frame);
    const away = frame.engines.filter((one) => one.phase === "starting" || one.phase === "down");
    if (frame.phase === "ready" && away.length) say("wait", `${frame.engines.length - away.length} of ${frame.engines.length} live`, away.map((one) => `Replica ${one.id} is ${one.phase}${one.reason ? `: ${one.reason}` : "."}`).join(" "));
    else if (frame.phase === "ready" && frame.engines.some((one) => one.is_paused)) say("wait", "paused", "Generation is paused: answers stand still, and requests wait, until POST /resume.");
    else if (frame.phase === "ready" && frame.engines.some((one) => one.standstill)) say("wait", "stands still", frame.engines.filter((one) => one.standstill).map((one) => `Engine ${one.id}: ${one.standstill}`).join(" "));
    else if (frame.phase === "ready") say("good", "live");
    else if (frame.phase === "draining") say("wait", "stopping", "The server is stopping: it finishes its open requests and takes no new ones.");
    else if (frame.phase === "starting") say("wait", "starting", frame.phase_reason ? `The engine is starting. ${frame.phase_reason}` : "The engine is starting; requests wait for it.");
    else say("bad", "engine down", `The engine is down. ${frame.phase_reason}`);
  },
  onLost(reason, pauseS) {
    say("bad", "reconnecting", `${reason} The figures below are old; trying again in ${pauseS} s.`);
  },
  onRefused(reason) {
    say("wait", "locked");
    write(find("key-reason"), reason);
    find("key").hidden = false;
    find("content").hidden = !latest;
    find("key-field").focus();
  },
});

const player = new Player({
  onOpen() {
    live.stop();
    for (const id of ["key", "notice"]) find(id).hidden = true;
    find("content").hidden = false;
    say("wait", "replay", "A journal does not tell of KV in use, of the limits of keys, of the tokens of each open request, or of each replica's figures.");
  },
  onLeave() {
    [offset, latest] = [null, null];
    history.replaceState(null, "", location.pathname);
    live.start();
  },
  onTrouble(reason) {
    write(find("notice"), reason);
    find("notice").hidden = false;
  },
});

// One time for tiles, tables and charts.
const choices = document.querySelectorAll("[data-span]");
for (const button of choices) {
  button.addEventListener("click", () => {
    for (const other of choices) other.setAttribute("aria-pressed", String(other === button));
    live.look(Number(button.dataset.span));
    player.news = true;
  });
}

find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(find("key-field").value);
  start();
});

theme.apply(find("theme"), () => latest && show(latest));

// A key for the search, as on many pages.
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, textarea, select")) return;
  event.preventDefault();
  find("search").focus();
});

// ── journals: chosen, dropped, or named in the address ──────────────────────────────────────────────────────────────

const openFile = async (file) => file && player.open(await file.text(), file.name);
find("file").addEventListener("change", (event) => openFile(event.target.files[0]));
for (const kind of ["dragenter", "dragover"]) {
  addEventListener(kind, (event) => {
    event.preventDefault();
    find("drop").hidden = false;
  });
}
addEventListener("dragleave", (event) => event.relatedTarget ?? (find("drop").hidden = true));
addEventListener("drop", (event) => {
  event.preventDefault();
  find("drop").hidden = true;
  openFile(event.dataTransfer.files[0]);
});

/** `?journal=run.jsonl` names one of the server's journals. A path is read from this server only. */
async function openAddress(asked) {
  const url = new URL(asked.includes("/") ? asked : `dashboard/journals/${asked}`, document.baseURI);
  if (url.origin !== location.origin) return player.onTrouble(`${asked} is on another server; only journals of this server are read.`);
  try {
    const reply = await fetch(url, { headers: withKey() });
    if (!reply.ok) return player.onTrouble(await reasonIn(reply));
    player.open(await reply.text(), url.pathname.split("/").at(-1));
  } catch {
    player.onTrouble(`${asked} could not be read.`);
  }
}

// ── the clock ───────────────────────────────────────────────────────────────────────────────────────────────────────

const isStill = matchMedia("(prefers-reduced-motion: reduce)");
let [drawnAt, framedAt] = [0, 0];

function drawLoop(at) {
  requestAnimationFrame(drawLoop);
  if (at - drawnAt < (isStill.matches ? 1000 : DRAW_MS)) return;
  drawnAt = at;
  if (player.journal) {
    const now = player.tick();
    if (player.news || (player.isPlaying && at - framedAt > FRAME_MS)) {
      framedAt = at;
      player.news = false;
      show(player.journal.frame(now, live.windowS));
    }
    strip.draw(now);
  } else if (offset !== null) {
    strip.draw(at / 1000 + offset - LATE_S);
  }
}

function start() {
  const asked = new URLSearchParams(location.search).get("journal");
  live.start();
  if (asked) openAddress(asked);
}

start();
requestAnimationFrame(drawLoop);
