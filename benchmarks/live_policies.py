"""Serves one scenario live on the CPU under wait, drain and rotate, and checks that all three answer alike.

    OMP_WAIT_POLICY=passive python -m benchmarks.live_policies [--dtype float32|bfloat16] [--rate 2] [--output FOLDER]

The built-in model with its six adapters on three slots, in real time and in this process: the engine, the loop and the
scheduler that `rota serve` runs, without HTTP. Decoding is greedy, so an answer depends on its prompt and its adapter
alone, and parking a sequence, moving its adapter or batching it with others must not change it. That is checked in
float32. In bfloat16 a matrix product rounds differently when other rows are beside it, whatever the policy, and tokens
that are nearly as likely as each other change places: how many answers did is printed, and is no error.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import AdapterAdded, AdapterRefused, Event, Finished, Produced
from rota.core.ids import RequestId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AddAdapter
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.engine.build import build_engine
from rota.engine.folders.builtin import CALLER, MODEL_NAME, builtin_adapters, builtin_model_folder
from rota.observe.summary import Recorder, mean_of
from rota.observe.table import print_table
from rota.runtime.registry import Registry
from rota.workload.arrivals import Arrival, asks
from rota.workload.scenario import Scenario, read_scenario
from tests.in_process import InProcessService

SCENARIO = Path(__file__).parent / "scenarios" / "live-cpu.toml"
POLICIES = ("wait", "drain", "rotate")
VOCABULARY = range(100, 40_000)  # ordinary words, no control tokens

Answers = dict[RequestId, list[int]]


@dataclass(slots=True)
class Client:
    """Asks a service in real time and writes down what comes back."""

    service: InProcessService
    recorder: Recorder = field(default_factory=Recorder)
    answers: Answers = field(default_factory=lambda: defaultdict(list))
    _ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self, registry: Registry) -> None:
        """Returns when every adapter can be asked for."""
        self.service.start(self._deliver)
        self.service.wait_until_ready()
        for adapter in registry.adapters:
            self.service.send(AddAdapter(adapter=adapter, at=time.monotonic()))
        self._wait_for(len(registry.adapters))

    def ask_all(self, asked: Sequence[Arrival], seed: int, prefix: str = "") -> None:
        """Each at its moment; returns when the last has been answered."""
        started_at = time.monotonic()
        for ask in asked:
            time.sleep(max(0.0, started_at + ask.at - time.monotonic()))
            self._ask(ask, f"{prefix}{ask.number:03d}", seed)
        self._wait_for(len(asked))

    def _ask(self, ask: Arrival, name: str, seed: int) -> None:
        dice = random.Random(f"{seed} {name}")
        prompt = tuple(dice.choices(VOCABULARY, k=ask.prompt_tokens))
        sampling = SamplingParams(max_new_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True)
        request_id, now = RequestId(name), time.monotonic()
        self.recorder.asked(request_id, ask.adapter_id, now)
        self.service.send(
            Request(request_id=request_id, prompt=prompt, sampling=sampling, arrived_at=now, adapter_id=ask.adapter_id)
        )

    def _deliver(self, events: list[Event]) -> None:
        self.recorder.observe(events)
        for event in events:
            match event:
                case Produced(request_ids=request_ids, tokens=tokens):
                    for request_id, token in zip(request_ids, tokens, strict=True):
                        self.answers[request_id].append(token)
                case Finished(fault=fault):
                    assert fault is None, fault
                    self._ended.release()
                case AdapterAdded():
                    self._ended.release()
                case AdapterRefused(reason=reason):
                    raise AssertionError(reason)

    def _wait_for(self, endings: int) -> None:
        for _ in range(endings):
            self._ended.acquire()


def serve(scenario: Scenario, config: EngineConfig, seed: int) -> Client:
    """One scenario from start to end in an engine of its own, warmed first with a request for each adapter."""
    registry = Registry(MODEL_NAME, str(config.model.model_path))
    for name, path in builtin_adapters().items():
        if name != CALLER:
            registry.add(LoraPath(name=name, path=str(path)))
    client = Client(InProcessService(partial(build_engine, config), config))
    try:
        client.start(registry)
        client.ask_all(
            [
                Arrival(number=n, at=0.0, adapter_id=one.adapter_id, prompt_tokens=16, output_tokens=4)
                for n, one in enumerate(registry.adapters)
            ],
            seed,
            "warm ",
        )
        client.recorder = Recorder()
        client.answers.clear()
        client.ask_all(list(asks(scenario.clients[0], seed)), seed)
    finally:
        client.service.stop()
    return client


def engine_config(scenario: Scenario, policy: str, dtype: Any, threshold_s: float) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model_path=str(builtin_model_folder(quiet=True)), device="cpu", dtype=dtype),
        cache=CacheConfig(kv_blocks=scenario.kv_blocks),
        scheduler=SchedulerConfig(max_running_requests=scenario.max_running_requests),
        lora=LoraConfig(max_loras_per_batch=scenario.slots),
        policy=PolicyConfig(lora_policy=policy, lora_drain_wait_threshold=threshold_s),
        quiet=True,
    )


def differing(answers: dict[str, Answers]) -> list[RequestId]:
    """Requests that were not answered alike under all policies."""
    first, *others = answers.values()
    return [request_id for request_id in first if any(other[request_id] != first[request_id] for other in others)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threshold", type=float, default=1.0, help="seconds before drain drains")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--output", type=Path, help="write DATE-live-policies.json into this folder")
    options = parser.parse_args()
    scenario = read_scenario(SCENARIO)
    client = replace(scenario.clients[0], rate_per_s=options.rate, requests=options.requests)
    scenario = replace(scenario, clients=(client,))
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    parted = 0
    for seed in tqdm(range(options.seeds), unit="seed", disable=None):
        answers: dict[str, Answers] = {}
        for policy in POLICIES:
            served = serve(scenario, engine_config(scenario, policy, options.dtype, options.threshold), seed)
            runs[policy].append(served.recorder.summary())
            answers[policy] = served.answers
        parted += len(differing(answers))
    summaries = {policy: mean_of(found) for policy, found in runs.items()}
    print_table(summaries)
    asked = options.requests * options.seeds
    verdict = f"{asked - parted} of {asked} greedy answers in {options.dtype} are token-identical under all three."
    print(verdict)
    if options.output:
        write(options, verdict, summaries)
    if parted and options.dtype == "float32":
        sys.exit("A policy must not change an answer.")


def write(options: argparse.Namespace, verdict: str, summaries: dict[str, Any]) -> None:
    today = date.today().isoformat()
    found = {
        "command": " ".join(["OMP_WAIT_POLICY=passive python -m benchmarks.live_policies", *sys.argv[1:]]),
        "machine": f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": today,
        "answers": verdict,
        "policies": summaries,
    }
    path = options.output / f"{today}-live-policies-{options.dtype}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
