"""Finds the highest rate of real conversations over a hundred adapters at which readers do not wait, simulated.

    python -m benchmarks.azure AzureLLMInferenceTrace_conv.csv [--only rotate vllm …] [--output FOLDER]
    python -m benchmarks.azure AzureLLMInferenceTrace_conv.csv --speed 2 [--minutes 60]
    python -m benchmarks.azure AzureLLMInferenceTrace_conv.csv --speed 2 --write-trace window.jsonl
    python -m benchmarks.azure AzureLLMInferenceTrace_conv.csv --write-server FOLDER

The trace is not part of Rota: AzureLLMInferenceTrace_conv of the Azure Public Dataset
(github.com/Azure/AzurePublicDataset), licence CC-BY 4.0, published with "Splitwise: Efficient Generative LLM Inference
Using Phase Splitting" (Patel et al., ISCA 2024). It has 19,366 conversations in 3,502 seconds of 2023-11-16: when each
came, and the tokens of its prompt and of its answer. It names no adapters. Here each request asks for one of a hundred,
the n-th of which is 1/n as popular as the first. An adapter's rank is 8, 16, 32, 64 or 128, each half as likely as the
one before it, whatever its popularity. Both are drawn by `--seed`, an adapter's rank and a request's adapter alike.

A run takes the first minutes of the trace, faster or slower: `--speed 2` asks the same requests in half the time.
Without `--speed` the highest rate is searched that *holds*: TTFT P99 is at most 0.5 s, the P99 over answers of the
longest visible stall at most 1 s, and no request fails. The search halves the distance between a rate that holds and
one that does not. It takes for granted that no rate above one that does not hold holds.

What both sides are given:

- an H200 with Llama-3.1-8B in bf16, 256 rows and 49,152 blocks of KV, and all adapters in host memory;
- the bytes of `--slots` slots of rank 128 for adapters on the device, 5.4 GB for eight. Rota's slots share them as
  pages. vLLM's slots are all of the largest rank, so there are eight;
- requests that name `--max-tokens` as their limit, as clients do, so that no answer's length is known before.

vLLM's rule is `wait`, with the weights of an adapter copied inside the step, on the costs fitted to what clients
measured of vLLM 0.26 (src/rota/sim/costs/h200-llama8b-vllm.toml), and without Rota's limit to the time of a step. It
may compute 8,192 tokens a step as its server does; `vllm-2048` has Rota's 2,048.

With pages, steps and copies cost what an H200 took with these adapters. Without pages steps cost what adapters of rank
16 cost, and copies take as long as the mean rank says: neither Rota nor vLLM is charged for higher ranks there, nor for
slots that are padded to rank 128. vLLM is not charged for the attention of long prompts either, which its fit does not
know.

The same window over HTTP, on an H200, with what the last two commands above wrote:

    rota serve --config FOLDER/serve.toml
    rota bench --dataset-name trace --dataset-path window.jsonl --json FILE
    vllm serve FOLDER/model --load-format dummy --enable-lora --max-loras 8 --max-lora-rank 128 --max-cpu-loras 100 \
        --max-num-seqs 256 --no-enable-prefix-caching --lora-modules adapter1=FOLDER/rank32-1 …
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import AddAdapter, Message
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.observe.summary import Recorder
from rota.observe.table import seconds
from rota.runtime.loop import run as serve
from rota.scheduler import Scheduler
from rota.sim.cost import LinearCost, read_cost
from rota.sim.run import BLOCK_SIZE, STARTS_AT, adapter_name
from rota.sim.world import VirtualWorld

PAGE = Path("2026-11-20-azure")
DATE, MACHINE = "2026-11-20", "two Xeons, Python 3.11 and 3.12; times are simulated"

# Fitted to steps with the adapters of `--write-server`; copies are the mean of those of the run over HTTP.
COST_OF_PAGES = str(Path(__file__).parent / "results/h200/2026-11-19-fit/ranks.toml")

ADAPTERS, ZIPF = 100, 1.0
RANKS, PAGE_RANK, FITTED_RANK = (8, 16, 32, 64, 128), 8, 16
SLOTS = 8  # of the largest rank: their bytes are what either side's adapters may take on the device
ROWS, KV_BLOCKS, LONGEST = 256, 49_152, 32_768

RANK_BYTES, H200_BYTES = 5_242_880, 150_100_000_000  # of each rank of an adapter on all projections; of the device
B_BYTES = 2_752_512  # of each rank's B: beside its pages a bank has room for the B of its largest adapter, to turn it

TTFT_S, STALL_S = 0.5, 1.0
KEPT = ("requests", "failed", "output_tokens_per_s", "ttft_s", "e2e_s", "gap_s", "stall_s")  # of a run's summary
SLOWEST, FASTEST, CLOSE_ENOUGH = 0.2, 5.0, 1.03  # speeds of the search, and how near its two ends come

# ── trace ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The trace says when and how long; adapters are drawn.


@dataclass(frozen=True, slots=True)
class Asked:
    """One conversation: `at` counts from the first one."""

    at: float
    prompt_tokens: int
    output_tokens: int
    adapter_id: AdapterId


def read_azure(path: Path, seed: int, window_s: float) -> list[Asked]:
    """Those of the first `window_s` seconds. A longer window begins with the requests and adapters of a shorter one."""
    dice = random.Random(f"{seed} adapters")
    weights = list(accumulate(number**-ZIPF for number in range(1, ADAPTERS + 1)))
    found: list[Asked] = []
    begun: datetime | None = None
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            at = datetime.fromisoformat(line["TIMESTAMP"][:26])  # without the last digit, of tenths of microseconds
            begun = begun or at
            (number,) = dice.choices(range(1, ADAPTERS + 1), cum_weights=weights)
            after_s = (at - begun).total_seconds()
            if after_s >= window_s:
                break
            found.append(Asked(after_s, int(line["ContextTokens"]), int(line["GeneratedTokens"]), AdapterId(number)))
    return found


def draw_ranks(seed: int) -> list[int]:
    """The rank of adapter 1, of adapter 2 and so on."""
    return random.Random(f"{seed} ranks").choices(RANKS, weights=[1 / rank for rank in RANKS], k=ADAPTERS)


# ── side ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A side is a server: a rule about slots, what its steps take, and how adapters share memory.


SCHEDULER = SchedulerConfig(max_running_requests=ROWS, enable_prefix_caching=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    about: str
    policy: PolicyConfig
    cost: str = COST_OF_PAGES
    has_pages: bool = True
    scheduler: SchedulerConfig = SCHEDULER
    overlaps_loads: bool = True


ROTATE, WAIT = PolicyConfig(lora_policy="rotate"), PolicyConfig(lora_policy="wait")
VLLM = Side(
    about="vLLM's rule and costs, slots of rank 128, 8,192 tokens a step",
    policy=WAIT,
    cost="h200-llama8b-vllm",
    has_pages=False,
    scheduler=replace(SCHEDULER, chunked_prefill_size=8192, max_step_ms=1e6),
    overlaps_loads=False,
)
SIDES = {
    "rotate": Side(about="`rotate`, pages", policy=ROTATE),
    "drain": Side(about="`drain` after 2 s, pages", policy=PolicyConfig(lora_policy="drain")),
    "wait": Side(about="`wait`, pages", policy=WAIT),
    "rotate-slots": Side(about="`rotate`, slots of rank 128", policy=ROTATE, cost="h200-llama8b", has_pages=False),
    "wait-slots": Side(about="`wait`, slots of rank 128", policy=WAIT, cost="h200-llama8b", has_pages=False),
    "vllm": VLLM,
    "vllm-2048": replace(
        VLLM,
        about="vLLM's rule and costs, slots of rank 128, 2,048 tokens a step",
        scheduler=replace(VLLM.scheduler, chunked_prefill_size=2048),
    ),
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked of every side."""

    asked: list[Asked]
    ranks: list[int]
    window_s: float
    max_tokens: int | None
    slots: int = SLOTS  # of the largest rank, or as many bytes of pages

    def rate(self, speed: float) -> float:
        return len(self.asked) * speed / self.window_s

    @property
    def pages(self) -> int:
        return max(RANKS) * (self.slots * RANK_BYTES - B_BYTES) // (PAGE_RANK * RANK_BYTES)

    def pages_of(self, adapter_id: AdapterId) -> int:
        return self.ranks[adapter_id - 1] // PAGE_RANK

    def requests(self, speed: float, front_s: float, recorder: Recorder) -> Iterator[tuple[float, Message]]:
        """Each as it comes; the n-th token of an answer is n, and so its stop token says how long it is."""
        numbers = tuple(range(LONGEST))
        for number, one in enumerate(self.asked):
            request_id, at = RequestId(f"{number:07d}"), STARTS_AT + one.at / speed
            recorder.asked(request_id, one.adapter_id, at)
            limit = self.max_tokens or one.output_tokens
            sampling = SamplingParams(
                max_new_tokens=limit, temperature=0.0, stop_token_ids=frozenset((one.output_tokens,))
            )
            request = Request(
                request_id=request_id,
                prompt=numbers[: one.prompt_tokens],
                sampling=sampling,
                arrived_at=at + front_s,
                adapter_id=one.adapter_id,
            )
            yield request.arrived_at, request


def simulate(side: Side, traffic: Traffic, speed: float) -> dict[str, Any]:
    """One run, and what its clients saw."""
    costs, began_at = _costs(side, traffic), time.process_time()
    slots = ADAPTERS if side.has_pages else traffic.slots
    capacity = Capacity(
        blocks=KV_BLOCKS,
        block_size=BLOCK_SIZE,
        rows=ROWS,
        max_sequence_tokens=LONGEST,
        slots=slots,
        pages=traffic.pages if side.has_pages else 0,
        deep_prefix=round(costs.long_prompt_token_s / costs.prefix_pair_s) if costs.prefix_pair_s else None,
    )
    lora = LoraConfig(max_loras_per_batch=slots, enable_lora_overlap_loading=side.overlaps_loads)
    scheduler = Scheduler(side.scheduler, capacity, side.policy, lora)
    adapters = [Adapter(adapter_id=AdapterId(n), name=adapter_name(AdapterId(n)), path="") for n in _numbers()]
    adds = [(0.0, AddAdapter(adapter=adapter, at=0.0)) for adapter in adapters]
    world = VirtualWorld(adds, costs, pages_of=traffic.pages_of if side.has_pages else None)
    recorder = Recorder()
    world.follow(traffic.requests(speed, costs.front_s, recorder))
    serve(scheduler, world, recorder.observe, side.scheduler.overlap_depth)
    summary = recorder.summary()
    return {
        "speed": speed,
        "rate_per_s": traffic.rate(speed),
        **{name: summary[name] for name in KEPT},
        "took_s": round(time.process_time() - began_at, 1),
    }


def _numbers() -> range:
    return range(1, ADAPTERS + 1)


def _costs(side: Side, traffic: Traffic) -> LinearCost:
    """Where they were fitted to adapters of one rank, a copy takes as long as its bytes."""
    costs = read_cost(side.cost)
    if side.has_pages:
        return costs
    return replace(costs, load_s=costs.load_s * statistics.mean(traffic.ranks) / FITTED_RANK)


def holds(found: dict[str, Any]) -> bool:
    return bool(not found["failed"] and found["ttft_s"]["p99"] <= TTFT_S and found["stall_s"]["p99"] <= STALL_S)


# ── search ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The search halves, in proportion, the way from a speed that holds to one that does not.


def search(try_at: Callable[[float], dict[str, Any]]) -> list[dict[str, Any]]:
    """Every run that was made, in order of speed."""
    low, high, found = SLOWEST, FASTEST, list[dict[str, Any]]()
    while high / low > CLOSE_ENOUGH:
        found.append(try_at(math.sqrt(low * high)))
        if found[-1]["holds"]:
            low = found[-1]["speed"]
        else:
            high = found[-1]["speed"]
    return sorted(found, key=lambda one: float(one["speed"]))


def highest(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The run at the highest speed that holds; None: none does."""
    return max((one for one in found if one["holds"]), key=lambda one: float(one["speed"]), default=None)


# ── page ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The page has a row for each side at the highest rate that it holds, and one at the trace's own.

HEADS = [
    "server",
    "requests/s",
    "TTFT median / P99",
    "visible stall P99",
    "longest pause P99",
    "E2E mean / P99",
    "tok/s",
]


def row(about: str, found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return [about, "none", *["–"] * (len(HEADS) - 2)]
    ttft, e2e = found["ttft_s"], found["e2e_s"]
    return [
        about,
        f"{found['rate_per_s']:.1f}",
        f"{seconds(ttft['median'])} / {seconds(ttft['p99'])}",
        seconds(found["stall_s"]["p99"]),
        seconds(found["gap_s"]["p99"]),
        f"{seconds(e2e['mean'])} / {seconds(e2e['p99'])}",
        f"{found['output_tokens_per_s']:,.0f}",
    ]


def page(figures: dict[str, Any]) -> str:
    sides = figures["sides"]
    best = [row(one["about"], highest(one["runs"])) for one in sides.values()]
    own = [row(one["about"], run) for one in sides.values() for run in one["runs"] if math.isclose(run["speed"], 1.0)]
    return "\n\n".join(
        [
            "# Conversations over a hundred adapters, simulated",
            f"`{figures['command']}`, {DATE}, {MACHINE}. What is asked, and what each side is given, is in the script. "
            f"{figures['requests']:,} requests, the first {figures['window_s'] / 60:g} minutes of the trace. "
            f"Adapters of each rank: {figures['ranks']}; on the device they take at most the bytes of "
            f"{figures['slots']} slots of rank 128. The trace: Azure Public Dataset, AzureLLMInferenceTrace_conv, "
            "CC-BY 4.0.",
            f"The highest rate at which TTFT P99 is at most {TTFT_S:g} s and the P99 of visible stalls at most "
            f"{STALL_S:g} s, found to {CLOSE_ENOUGH - 1.0:.0%}:",
            table(best),
            "At the trace's own rate:",
            table(own),
        ]
    )


def table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEADS, ["---"] * len(HEADS), *rows])


# ── over HTTP ───────────────────────────────────────────────────────────────────────────────────────────────────────
# The same requests for a real server: a trace for `rota bench`, and a model with the adapters.


def write_trace(file: Path, traffic: Traffic, speed: float) -> None:
    """Over HTTP a request's limit is the length of its answer: a random model does not end by itself."""
    lines = (
        {
            "at": round(one.at / speed, 6),
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "adapter": adapter_name(one.adapter_id),
        }
        for one in traffic.asked
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_server(folder: Path, shape: str, ranks: list[int], slots: int) -> None:
    """A random model and adapters of these ranks (10 GB for the 8B), and serve.toml for `rota serve --config`."""
    import torch  # takes seconds, which a search need not

    from benchmarks.h200.assets import make_adapter, make_model, write_tokenizer
    from benchmarks.h200.shapes import SHAPES

    folder.mkdir(parents=True)
    config = SHAPES[shape].config | {"max_position_embeddings": LONGEST}
    model = make_model(folder / "model", config)
    write_tokenizer(model, config["vocab_size"])
    paths = {adapter_name(AdapterId(number)): folder / f"rank{rank}-{number}" for number, rank in enumerate(ranks, 1)}
    for rank, path in zip(ranks, paths.values(), strict=True):
        make_adapter(path, model, rank, "cuda" if torch.cuda.is_available() else "cpu")
    options = {
        "model_path": str(model),
        "load_format": "dummy",
        "max_running_requests": ROWS,
        "kv_blocks": KV_BLOCKS,
        "enable_prefix_caching": False,
        "lora_memory_share": round(slots * max(RANKS) * RANK_BYTES / H200_BYTES, 4),
        "lora_paths": [f"{name}={path}" for name, path in paths.items()],
    }
    (folder / "serve.toml").write_text("".join(f"{name} = {json.dumps(one)}\n" for name, one in options.items()))


# ── command ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The command searches, or makes single runs, or writes what a real server needs.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), help="these sides")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the trace, from its beginning (8)")
    parser.add_argument("--speed", type=float, nargs="+", help="run at these speeds, and do not search")
    parser.add_argument("--seed", type=int, default=0, help="of adapters and ranks (0)")
    parser.add_argument("--slots", type=int, default=SLOTS, help=f"of rank 128, for either side's adapters ({SLOTS})")
    parser.add_argument("--max-tokens", type=int, default=4096, help="limit of requests (4096); 0: the answer's length")
    parser.add_argument("--output", type=Path, help=f"write {PAGE}.md and .json into this folder")
    parser.add_argument("--page", type=Path, default=PAGE, help="write pages of this name instead")
    parser.add_argument("--write-trace", type=Path, help="write the requests for 'rota bench' to this file, and end")
    parser.add_argument("--write-server", type=Path, help="write model, adapters and serve.toml there, and end")
    parser.add_argument("--shape", default="llama-8b", choices=("llama-8b", "tiny"), help="of that model")
    options = parser.parse_args()

    asked = read_azure(options.trace, options.seed, 60.0 * options.minutes)
    traffic = Traffic(
        asked, draw_ranks(options.seed), 60.0 * options.minutes, options.max_tokens or None, options.slots
    )
    if options.write_trace:
        write_trace(options.write_trace, traffic, (options.speed or [1.0])[0])
    if options.write_server:
        write_server(options.write_server, options.shape, traffic.ranks, traffic.slots)
    if options.write_trace or options.write_server:
        return
    ranks = ", ".join(f"{rank}: {traffic.ranks.count(rank)}" for rank in RANKS)
    figures: dict[str, Any] = {
        "command": f"python -m benchmarks.azure {' '.join(['TRACE', *sys.argv[2:]])}",
        "date": DATE,
        "machine": MACHINE,
        "requests": len(asked),
        "window_s": traffic.window_s,
        "ranks": ranks,
        "slots": traffic.slots,
        "sides": {},
    }
    for name in options.only:
        figures["sides"][name] = measure(name, traffic, options.speed)
        if options.output:
            file = options.output / options.page
            file.with_suffix(".json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
            file.with_suffix(".md").write_text(page(figures) + "\n")


def measure(name: str, traffic: Traffic, speeds: list[float] | None) -> dict[str, Any]:
    """The runs of a side, each told as it is done."""

    def try_at(speed: float) -> dict[str, Any]:
        found = simulate(SIDES[name], traffic, speed)
        found["holds"] = holds(found)
        told = f"TTFT P99 {seconds(found['ttft_s']['p99'])}, stall P99 {seconds(found['stall_s']['p99'])}"
        verdict = "holds" if found["holds"] else "does not hold"
        print(f"{name}: {found['rate_per_s']:.2f}/s {verdict}: {told} ({found['took_s']:.0f} s)", flush=True)
        return found

    runs = [try_at(speed) for speed in speeds] if speeds else search(try_at)
    return {"about": SIDES[name].about, "runs": runs}


if __name__ == "__main__":
    main()
