"""All metrics are in one table, with name, kind, labels and meaning, for code, documentation and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric as a scraper sees it."""

    kind: Kind
    name: str
    labels: tuple[str, ...]
    sentence: str
    is_asked: bool = False  # only the engine knows the value, and each scrape asks for it


def _metric(kind: Kind, name: str, sentence: str, *labels: str) -> Metric:
    return Metric(kind=kind, name=f"rota_{name}", labels=labels, sentence=sentence)


def _asked(name: str, sentence: str, *labels: str) -> Metric:
    return Metric(kind="gauge", name=f"rota_{name}", labels=labels, sentence=sentence, is_asked=True)


def _process(name: str, sentence: str) -> Metric:
    """Under the name that every Prometheus client gives it, and so without our own beginning."""
    return Metric(kind="gauge", name=f"process_{name}", labels=(), sentence=sentence)


ENGINE_UP = _metric("gauge", "engine_up", "1 while the engine serves; 0 while it starts or is down.", "engine")
ENGINE_GIVEN_UP = _metric(
    "gauge",
    "engine_given_up",
    "1 once the engine stays down, because it died too often; the other engines serve on.",
    "engine",
)
PAUSED = _metric("gauge", "paused", "1 while the engine is paused: no step is computed until /resume.", "engine")
STANDSTILLS = _metric(
    "counter",
    "standstills_total",
    "How often no step ran for ten seconds while requests were open: they were `waiting` for what was under way, such "
    "as a slow disk, or `stuck`, because nothing was.",
    "engine",
    "kind",
)
ENGINE_RESTARTS = _metric("counter", "engine_restarts_total", "Engines that died and were started again.", "engine")

CPU = Metric(
    kind="counter", name="process_cpu_seconds_total", labels=(), sentence="Processor time of the server's process."
)
MEMORY = _process("resident_memory_bytes", "Resident memory of the server's process.")
FILES = _process("open_fds", "Open files and connections of the server's process.")
MOST_FILES = _process("max_fds", "Files that the server's process may have open.")
THREADS = _process("threads", "Threads of the server's process.")
STARTED = _process("start_time_seconds", "When the server's process started, in seconds since 1970.")
ENGINE_CPU = _metric("counter", "engine_process_cpu_seconds_total", "Processor time of the engine's process.", "engine")
ENGINE_MEMORY = _metric(
    "gauge", "engine_process_resident_memory_bytes", "Resident memory of the engine's process.", "engine"
)
ENGINE_FILES = _metric("gauge", "engine_process_open_fds", "Open files of the engine's process.", "engine")
ENGINE_MOST_FILES = _metric(
    "gauge", "engine_process_max_fds", "Files that the engine's process may have open.", "engine"
)
ENGINE_THREADS = _metric("gauge", "engine_process_threads", "Threads of the engine's process.", "engine")
ENGINE_STARTED = _metric(
    "gauge",
    "engine_process_start_time_seconds",
    "When the engine's process started, in seconds since 1970.",
    "engine",
)

REQUESTS = _metric(
    "counter",
    "requests_total",
    "Requests that ended: by `stop`, `length`, `abort`, or the code of the fault that ended them.",
    "adapter",
    "outcome",
)
WAITING = _asked("requests_waiting", "Requests in the queue.", "adapter")
RUNNING = _asked("requests_running", "Requests that take part in steps.", "adapter")
PARKED = _asked("requests_parked", "Requests that hold KV and do not run, for want of a slot or a row.", "adapter")
OLDEST_WAIT = _asked("oldest_wait_seconds", "How long the longest waiting request has waited.", "adapter")

TTFT = _metric("histogram", "ttft_seconds", "From a request's arrival to its first token.", "adapter")
QUEUE_WAIT = _metric("histogram", "queue_wait_seconds", "From a request's arrival to its admission.", "adapter")
TOKEN_GAP = _metric("histogram", "token_gap_seconds", "Between two tokens of the same request.", "adapter")
E2E = _metric(
    "histogram", "e2e_seconds", "From arrival to end, of requests that ended by `stop` or `length`.", "adapter"
)

PROMPT_TOKENS = _metric(
    "counter", "prompt_tokens_total", "Prompt tokens of requests that had been admitted.", "adapter"
)
CACHED_TOKENS = _metric("counter", "cached_tokens_total", "Prompt tokens whose KV was already in the cache.", "adapter")
OUTPUT_TOKENS = _metric("counter", "output_tokens_total", "Tokens produced.", "adapter")
PREEMPTIONS = _metric(
    "counter", "preemptions_total", "Requests that gave their KV back to be computed again.", "adapter"
)

KEY_REQUESTS = _metric(
    "counter",
    "key_requests_total",
    "Requests of a key that ended, by the outcomes of `rota_requests_total`.",
    "key",
    "outcome",
)
KEY_OPEN = _metric("gauge", "key_requests_open", "Requests of a key that have not ended.", "key")
KEY_QUEUE_WAIT = _metric(
    "histogram", "key_queue_wait_seconds", "From the arrival of a key's request to its admission.", "key"
)
KEY_PROMPT_TOKENS = _metric(
    "counter", "key_prompt_tokens_total", "Prompt tokens of a key's requests that had been admitted.", "key"
)
KEY_OUTPUT_TOKENS = _metric("counter", "key_output_tokens_total", "Tokens produced for a key.", "key")
KEY_LIMITS = _metric(
    "counter",
    "key_limits_met_total",
    "Calls that a limit of their key refused, by the limit's name in the key file.",
    "key",
    "limit",
)

TARGET_REQUESTS = _metric(
    "counter",
    "target_requests_total",
    "Requests that ended, of those that an adapter's traffic route sent to a target; outcomes as above.",
    "adapter",
    "target",
    "outcome",
)
TARGET_TTFT = _metric(
    "histogram", "target_ttft_seconds", "From the arrival of such a request to its first token.", "adapter", "target"
)
TARGET_WEIGHT = _metric(
    "gauge", "target_weight", "The share of an adapter's requests that a target gets.", "adapter", "target"
)
ROLLBACKS = _metric(
    "counter",
    "rollbacks_total",
    "Traffic routes that were rolled back because a target computed what is `not_a_number`, `failed` to be read, was "
    "`adapter_failed`, had a source that is away (`source_unavailable`), had no room on the server's disk "
    "(`disk_full`) or met one that fails (`disk_failed`), was `unloaded`, or was served when an engine died, twice "
    "(`engine_died`).",
    "cause",
)
SHADOWS = _metric(
    "counter",
    "shadow_requests_total",
    "Copies of requests for shadows, by the outcomes of `rota_requests_total`, or `dropped` for want of room.",
    "outcome",
)

ADAPTERS = _metric("gauge", "adapters_loaded", "Adapters that requests may ask for.")
LOST = _metric("gauge", "adapters_lost", "Adapters that could not be read after the start or a restart.")
QUARANTINED = _metric("gauge", "adapters_quarantined", "Adapters that are not served because engines died of them.")
LOSSES = _metric(
    "counter", "adapter_losses_total", "How often a restarted engine could not read an adapter again.", "engine"
)
SLOTS = _asked("slots", "Adapters that a step may hold.", "engine")
SLOTS_USED = _asked("slots_used", "Adapters that are ready in a slot.", "engine")
SLOTS_LOADING = _asked("slots_loading", "Adapters on their way into a slot.", "engine")
LOADS = _metric("counter", "adapter_loads_total", "Copies of an adapter into a slot.", "adapter")
LOAD_TIME = _metric(
    "histogram", "adapter_load_seconds", "From the order of a copy into a slot until steps may use the slot.", "engine"
)
EVICTIONS = _metric("counter", "adapter_evictions_total", "Adapters that left their slot, for any reason.", "adapter")
ROTATIONS = _metric("counter", "rotations_total", "Adapters that took a slot from an adapter with work left.", "engine")
ROUTED = _metric(
    "counter",
    "requests_routed_total",
    "Requests that were sent to this one of several engines, by the reason.",
    "engine",
    "reason",
)
DRAINS = _metric(
    "counter", "drains_total", "Drains that were `started`, `finished`, `called_off` or `expired`.", "engine", "state"
)
DELAYER_OUTCOMES = _metric(
    "counter",
    "prefill_delayer_outcomes_total",
    "Verdicts that let prompts start: `no_wait`, `wait_success`, `wait_timeout` or `token_watermark`.",
    "engine",
    "reason",
)
DELAYER_PASSES = _metric(
    "histogram", "prefill_delayer_wait_passes", "Passes that prompts were held back, if they were.", "engine"
)
DELAYER_WAIT = _metric(
    "histogram", "prefill_delayer_wait_seconds", "Seconds that prompts were held back, if they were.", "engine"
)

KV_BLOCKS = _asked("kv_blocks", "KV blocks of the cache.", "engine")
KV_BLOCKS_USED = _asked("kv_blocks_used", "KV blocks that requests hold.", "engine")
STEP_TIME = _metric("histogram", "step_seconds", "How long a step took on the device.", "engine")
COMPUTED_TOKENS = _metric(
    "counter", "computed_prompt_tokens_total", "Prompt tokens computed, also for a second time.", "engine"
)

CONNECTIONS = _metric("gauge", "connections_open", "Connections that are open.")
CONNECTIONS_LIMIT = _metric("gauge", "connections_limit", "Connections that may be open (`--max-connections`).")
CONNECTIONS_REFUSED = _metric(
    "counter",
    "connections_refused_total",
    "Connections refused: `address` has as many busy ones as it may have, `all` are busy, or `files` have run out.",
    "reason",
)
CONNECTIONS_CLOSED = _metric(
    "counter",
    "connections_closed_total",
    "Connections closed: `slow_head`, `slow_body`, `slow_reader`, or `made_room` for another while idle.",
    "reason",
)

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
