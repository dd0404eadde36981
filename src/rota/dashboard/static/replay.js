// A journal becomes frames: the same figures that the server counts live, counted afterwards.

import { isOn } from "./format.js";

const BIN_S = 2;
const [SMOOTH_BINS, RATE_BINS] = [5, 3];
const KEPT_S = 65;
// Tokens a second. A journal does not tell the server's --reader-pace; this is its default.
const READER_PACE = 20;
// A frame holds a little of the future, so that the strip moves smoothly until the next frame, also at 16×.
const AHEAD_S = 8;
// Points of the charts of an hour, as the server makes them.
const HOUR_S = 3600;
const HOUR_BINS = 15;
const MOST_SHOWN = 20;
const ORDER = ["waiting", "parked", "running"];

/** The index of the last item with at(item) <= moment, or -1. */
function lastBefore(items, moment, at) {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(items[middle]) <= moment) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function spread(values) {
  if (!values.length) return { p50: null, p99: null };
  const ordered = Float64Array.from(values).sort();
  const rank = (share) => ordered[Math.ceil(share * ordered.length) - 1];
  return { p50: rank(0.5), p99: rank(0.99) };
}

const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

/** A number that changes now and then. */
class Steps {
  constructor() {
    this.changes = [{ at: -Infinity, value: 0 }];
  }

  add(at, by) {
    if (by) this.changes.push({ at, value: this.changes.at(-1).value + by });
  }

  at(moment) {
    return this.changes[lastBefore(this.changes, moment, (change) => change.at)].value;
  }

  most(from, to) {
    const [first, last] = [from, to].map((moment) => lastBefore(this.changes, moment, (change) => change.at));
    return Math.max(...this.changes.slice(first, last + 1).map((change) => change.value));
  }
}

class Group {
  constructor() {
    this.name = null;
    this.queue = new Map();
    this.admitted = 0;
    this.changes = [{ at: -Infinity, waiting: 0, admitted: 0, oldest: null }];
  }

  note(at) {
    const oldest = this.queue.size ? this.queue.values().next().value : null;
    this.changes.push({ at, waiting: this.queue.size, admitted: this.admitted, oldest });
  }
}

export class Journal {
  constructor(text) {
    this.groups = new Map();
    this.requests = new Map();
    this.all = [];
    this.ranks = new Map();
    this.tenures = [];
    this.drains = [];
    this.bins = [];
    this.tenants = new Map();
    this.errors = [];
    this.restarts = [];
    this.standstills = [];
    this.open = { tenures: new Map(), drains: new Map() };
    this.group(0).name = "base";
    text.split("\n").forEach((line, index) => line.trim() && this.read(line, index + 1));
    if (this.begin === undefined) throw new Error("This journal is empty.");
    this.waiting = stepsOf(this.all, false);
    this.admitted = stepsOf(this.all, true);
    this.points = this.bins.map((_, index) => this.point(index + 1, SMOOTH_BINS, 1));
    this.hourPoints = this.bins.filter((_, index) => (index + 1) % HOUR_BINS === 0).map((_, index) => this.point((index + 1) * HOUR_BINS, HOUR_BINS, HOUR_BINS));
    this.engines = this.enginesSeen();
  }

  /** Each engine has as many slots as were used. */
  enginesSeen() {
    const slots = new Map([[0, 0]]);
    for (const { engine, slot } of this.tenures) slots.set(engine, Math.max(slots.get(engine) ?? 0, slot + 1));
    return [...slots].sort(([a], [b]) => a - b).map(([id, slots]) => ({ id, phase: "replay", slots }));
  }

  read(line, number) {
    let event;
    try {
      event = JSON.parse(line);
    } catch {
      // Reported below, with the line's number.
    }
    if (typeof event?.at !== "number" || typeof event.event !== "string") {
      throw new Error(`Line ${number} is not an event of a journal.`);
    }
    this.begin ??= event.at;
    this.end = Math.max(this.end ?? event.at, event.at);
    this[`on_${event.event}`]?.(event);
  }

  group(adapter) {
    if (!this.groups.has(adapter)) this.groups.set(adapter, new Group());
    return this.groups.get(adapter);
  }

  bin(at) {
    const index = Math.max(0, Math.floor((at - this.begin) / BIN_S));
    while (this.bins.length <= index) this.bins.push({ ttft: [], gap: [], step: [], stall: [], tokens: 0, prompts: 0, shares: new Map(), tenants: new Map() });
    return this.bins[index];
  }

  on_adapter_added({ adapter_id }) {
    this.group(adapter_id);
  }

  on_asked({ request_id, adapter_id, adapter, at, tenant = "" }) {
    const request = { id: request_id, adapter: adapter_id, at, last: at, readUntil: 0, stalled: 0, isBegun: false, reasons: [], tenant, story: [{ at, isAdmitted: false }], ended: Infinity };
    this.all.push(request);
    this.holds(tenant, at, adapter_id, 1, 0);
    this.requests.set(request_id, request);
    const group = this.group(adapter_id);
    group.name = adapter;
    group.queue.set(request_id, request);
    group.note(at);
  }

  on_admitted({ request_id, at, reasons }) {
    const request = this.requests.get(request_id);
    const group = request && this.group(request.adapter);
    if (!group?.queue.delete(request_id)) return;
    request.reasons = reasons ?? [];
    request.story.push({ at, isAdmitted: true });
    this.holds(request.tenant, at, request.adapter, -1, 1);
    group.admitted += 1;
    group.note(at);
  }

  on_preempted({ request_id, at }) {
    const request = this.requests.get(request_id);
    if (!request) return;
    const group = this.group(request.adapter);
    group.admitted -= 1;
    request.story.push({ at, isAdmitted: false });
    this.holds(request.tenant, at, request.adapter, 1, -1);
    group.queue.set(request_id, request);
    group.note(at);
  }

  on_finished({ request_id, at, reason, fault }) {
    const request = this.requests.get(request_id);
    if (fault) this.errors.push({ at, kind: fault.code, sentence: fault.message, tenant: request?.tenant });
    if (!request) return;
    request.ended = at;
    const group = this.group(request.adapter);
    const isWaiting = group.queue.delete(request_id);
    if (!isWaiting) group.admitted -= 1;
    this.holds(request.tenant, at, request.adapter, isWaiting ? -1 : 0, isWaiting ? 0 : -1);
    this.requests.delete(request_id);
    if (request.isBegun && (reason === "stop" || reason === "length")) this.bin(at).stall.push(request.stalled);
    group.note(at);
  }

  on_produced({ at, request_ids, step_s, prompt_tokens }) {
    const bin = this.bin(at);
    bin.tokens += request_ids.length;
    bin.prompts += prompt_tokens ?? 0;
    if (step_s) bin.step.push(step_s);
    for (const id of request_ids) {
      const request = this.requests.get(id);
      if (!request) continue;
      const shares = [shareIn(bin.shares, request.adapter), shareIn(bin.tenants, request.tenant)];
      for (const share of shares) share.tokens += 1;
      if (request.isBegun) {
        bin.gap.push(at - request.last);
        request.stalled = Math.max(request.stalled, at - request.readUntil);
      } else for (const list of [bin.ttft, ...shares.map((share) => share.ttft)]) list.push(at - request.last);
      request.readUntil = Math.max(at, request.readUntil) + 1 / READER_PACE;
      request.isBegun = true;
      request.last = at;
    }
  }

  on_host_changed({ adapter_id, rank }) {
    if (rank) this.ranks.set(adapter_id, rank);
  }

  on_engine_restarted({ at, reason, engine_id: engine = 0 }) {
    this.restarts.push({ at, engine, reason });
    this.on_went_on({ at, engine_id: engine });
  }

  on_stood_still({ at, since, waits_for: cause, engine_id: engine = 0 }) {
    this.on_went_on({ at, engine_id: engine });
    this.standstills.push({ begun_at: at, ended_at: Infinity, since, cause: cause || "nothing that is under way", engine });
  }

  on_went_on({ at, engine_id: engine = 0 }) {
    const last = this.standstills.findLast((one) => one.engine === engine);
    if (last) last.ended_at = Math.min(last.ended_at, at);
  }

  /** What the server says of an engine that stands still. */
  standstillOf(engine, now) {
    const one = this.standstills.find((one) => one.engine === engine && isOn(one, now));
    return one ? `Engine ${engine} stands still. No step for ${Math.round(now - one.since)} seconds, while requests wait for ${one.cause}.` : "";
  }

  /** A tenant has so many more or fewer requests that wait, and that are admitted. */
  holds(tenant, at, adapter, waiting, admitted) {
    if (!tenant) return;
    if (!this.tenants.has(tenant)) this.tenants.set(tenant, { waiting: new Steps(), admitted: new Map() });
    const held = this.tenants.get(tenant);
    if (!held.admitted.has(adapter)) held.admitted.set(adapter, new Steps());
    held.waiting.add(at, waiting);
    held.admitted.get(adapter).add(at, admitted);
  }

  on_slot_changed({ at, slot, adapter_id, state, reason, engine_id: engine = 0 }) {
    const place = `${engine} ${slot}`;
    const before = this.open.tenures.get(place);
    if (before) before.ended_at = at;
    this.open.tenures.delete(place);
    if (state === "empty") return;
    if (state === "loading") shareIn(this.bin(at).shares, adapter_id).loads += 1;
    const kept = before?.adapter === adapter_id ? before.reason : "";
    const tenure = { slot, adapter: adapter_id, state, reason: reason || kept, begun_at: at, ended_at: Infinity, engine };
    this.open.tenures.set(place, tenure);
    this.tenures.push(tenure);
  }

  on_drain_changed({ at, victim, beneficiary, state, engine_id: engine = 0 }) {
    if (state === "expired") return;
    const place = `${engine} ${victim}`;
    const before = this.open.drains.get(place);
    if (before) Object.assign(before, { ended_at: at, state });
    this.open.drains.delete(place);
    if (state !== "started") return;
    const drain = { victim, beneficiary, state, begun_at: at, ended_at: Infinity, engine };
    this.open.drains.set(place, drain);
    this.drains.push(drain);
  }

  /** The point of a chart that covers some bins before `end`; `every` bins lie between two points. */
  point(end, most, every) {
    const late = this.bins.slice(Math.max(0, end - most), end);
    const of = (name) => spread(late.flatMap((bin) => bin[name]));
    const [from, to] = [end - every, end].map((bins) => this.begin + BIN_S * bins);
    const lasted = BIN_S * late.length;
    const errors = this.errors.filter(({ at }) => at >= to - lasted && at < to).length;
    return {
      ttft: of("ttft"), gap: of("gap"), step: of("step"),
      tokens_per_s: sum(late, (bin) => bin.tokens) / lasted,
      waiting: this.waiting.most(from, to),
      admitted: this.admitted.most(from, to),
      errors_per_min: (60 * errors) / lasted,
    };
  }

  /** The part of a frame that changes once per bin, computed once per bin. */
  span(closed, windowS) {
    if (this.cached?.closed === closed && this.cached.window_s === windowS) return this.cached;
    const most = windowS / BIN_S;
    const bins = this.bins.slice(Math.max(0, closed - most), closed);
    const mean = (of) => sum(bins, of) / (BIN_S * Math.max(1, bins.length));
    const late = bins.slice(-RATE_BINS);
    const rate = (of) => (late.length ? sum(late, of) / (BIN_S * late.length) : 0);
    const isHour = windowS === HOUR_S;
    const points = isHour ? this.hourPoints.slice(0, Math.floor(closed / HOUR_BINS)).slice(-HOUR_S / (BIN_S * HOUR_BINS)) : this.points.slice(Math.max(0, closed - most), closed);
    const ended_at = this.begin + BIN_S * closed;
    this.cached = {
      closed,
      bins,
      window_s: windowS,
      mean_tokens_per_s: mean((bin) => bin.tokens),
      mean_prompt_tokens_per_s: mean((bin) => bin.prompts),
      tokens_per_s: rate((bin) => bin.tokens),
      prompt_tokens_per_s: rate((bin) => bin.prompts),
      ...Object.fromEntries(["ttft", "gap", "step", "stall"].map((name) => [name, spread(bins.flatMap((bin) => bin[name]))])),
      charts: { ended_at, every_s: isHour ? BIN_S * HOUR_BINS : BIN_S, points },
      rows: new Map(),
    };
    return this.cached;
  }

  frame(now, windowS = 60) {
    const closed = Math.min(this.bins.length, Math.floor((now - this.begin) / BIN_S));
    const { bins, rows, ...span } = this.span(closed, windowS);
    const isNear = (one) => one.begun_at <= now + AHEAD_S && one.ended_at > now - KEPT_S;
    const residents = this.tenures.filter((one) => isOn(one, now));
    const ready = new Set(residents.filter((one) => one.state === "ready").map((one) => one.adapter));
    const adapters = [...this.groups].sort(([a], [b]) => a - b).map(([id, group]) => {
      const { waiting, admitted, oldest } = group.changes[lastBefore(group.changes, now, (change) => change.at)];
      if (!rows.has(id)) rows.set(id, shareOf(bins, "shares", id));
      const isReady = id === 0 || ready.has(id);
      const name = group.name ?? `adapter ${id}`;
      const [running, parked] = isReady ? [admitted, 0] : [0, admitted];
      const waits = { oldest_at: oldest?.at ?? null, reason: oldest?.reasons.join(", then ") ?? "" };
      return { id, name, path: "", is_loaded: true, version: 1, is_current: true, place: "", rank: this.ranks.get(id) ?? 0, waiting, running, parked, ...waits, ...rows.get(id) };
    });
    const total = (name) => sum(adapters, (row) => row[name]);
    const past = this.restarts.filter((one) => one.at <= now);
    return {
      ...span,
      now,
      reader_pace: READER_PACE,
      phase: "replay",
      phase_reason: "",
      model: "",
      may_load: false,
      engines: this.engines,
      slots: sum(this.engines, (one) => one.slots),
      rows: 0,
      blocks: 0,
      blocks_used: 0,
      waiting: total("waiting"),
      running: total("running"),
      parked: total("parked"),
      residents,
      is_whole: true,
      tenures: this.tenures.filter(isNear),
      drains: this.drains.filter(isNear),
      adapters,
      gone: [],
      unlisted: 0,
      ...this.openAt(now, ready),
      notices: this.engines.map(({ id }) => this.standstillOf(id, now)).filter(Boolean),
      targets: [],
      tenants: this.tenantRows(now, windowS, bins, ready),
      unlisted_tenants: 0,
      errors: this.errorRows(now, windowS),
      restarts: past.slice(-10),
      restarts_total: past.length,
    };
  }

  tenantRows(now, windowS, bins, ready) {
    return [...this.tenants].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, held]) => {
      const all = [...held.admitted].map(([id, steps]) => [id, steps.at(now)]);
      const running = sum(all.filter(([id]) => id === 0 || ready.has(id)), ([, number]) => number);
      const parked = sum(all, ([, number]) => number) - running;
      return { name, waiting: held.waiting.at(now), running, parked, limits: [], errors: this.errorsOf(name, now, windowS), ...shareOf(bins, "tenants", name) };
    });
  }

  errorsOf(tenant, now, windowS) {
    const counts = new Map();
    for (const one of this.errors) {
      if (one.tenant === tenant && one.at <= now && one.at > now - windowS) counts.set(one.kind, (counts.get(one.kind) ?? 0) + 1);
    }
    return [...counts].sort(([, a], [, b]) => b - a);
  }

  /** The requests that are open at a moment: those that wait, that are parked, that run. */
  openAt(now, ready) {
    const rows = this.all.filter((one) => one.at <= now && now < one.ended).map((one) => {
      const { isAdmitted } = one.story[lastBefore(one.story, now, (change) => change.at)];
      const state = !isAdmitted ? "waiting" : one.adapter === 0 || ready.has(one.adapter) ? "running" : "parked";
      const reason = state === "waiting" ? one.reasons.join(", then ") : "";
      return { id: one.id, name: one.id.split("#")[0], adapter: one.adapter, tenant: one.tenant, engine: 0, state, asked_at: one.at, tokens: null, reason };
    });
    rows.sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.asked_at - b.asked_at);
    return { requests: rows.slice(0, MOST_SHOWN), unlisted_requests: Math.max(0, rows.length - MOST_SHOWN) };
  }

  errorRows(now, windowS) {
    const kinds = new Map();
    for (const { at, kind, sentence } of this.errors) {
      if (at > now) break;
      const row = kinds.get(kind) ?? { kind, recent: 0, total: 0 };
      kinds.set(kind, { ...row, recent: row.recent + (at > now - windowS), total: row.total + 1, last_at: at, sentence });
    }
    return [...kinds.values()].sort((a, b) => b.last_at - a.last_at);
  }
}

function shareIn(shares, sharer) {
  if (!shares.has(sharer)) shares.set(sharer, { tokens: 0, loads: 0, ttft: [] });
  return shares.get(sharer);
}

function shareOf(bins, kind, sharer) {
  const shares = bins.map((bin) => bin[kind].get(sharer)).filter(Boolean);
  const tokens_per_s = sum(shares, (share) => share.tokens) / (BIN_S * Math.max(1, bins.length));
  return { ttft: spread(shares.flatMap((share) => share.ttft)), tokens_per_s, loads: sum(shares, (share) => share.loads) };
}

/** How many of all requests wait, or were admitted, over time. */
function stepsOf(requests, isAdmitted) {
  const steps = new Steps();
  const changes = requests.flatMap(({ story, ended }) => story.flatMap((change, index) => (
    change.isAdmitted === isAdmitted ? [[change.at, 1], [story[index + 1]?.at ?? ended, -1]] : []
  )));
  for (const [at, by] of changes.sort(([a], [b]) => a - b)) if (at < Infinity) steps.add(at, by);
  return steps;
}
