"""Compares Rota with transformers, peft and llama.cpp on a CPU, in one run: the built-in model, 64 tokens in, 64 out.

    OMP_WAIT_POLICY=passive python -m benchmarks.cpu_generate [--rounds 3] [--output FILE]

Rota chooses precision, 4-bit weights and threads by itself; transformers computes in the precision that Rota chose. The
side of llama.cpp is there if its Python package is (`pip install llama-cpp-python`, which compiles it), with the same
4-bit file. Rounds alternate between the sides, because such machines are noisy; medians are reported with the spread.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rota import LLM, SamplingParams
from rota.core.config import EngineConfig, ModelConfig, SchedulerConfig
from rota.core.events import Event, Finished, Produced
from rota.core.ids import RequestId
from rota.core.request import Request
from rota.engine.build import build_engine
from rota.engine.choices import choose_dtype
from rota.engine.cpu import this_processor
from rota.engine.engine import Engine
from rota.engine.folders.builtin import builtin_model_folder, builtin_source
from rota.runtime.in_process import InProcessService

PROMPT, OUTPUT, BATCH, ADAPTERS = 64, 64, 16, 6


def prompts(count: int, lengths: list[int]) -> list[list[int]]:
    dice = random.Random(1)
    return [[dice.randrange(100, 40_000) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def generate(model: Any, asked: list[list[int]], outputs: int, **extra: Any) -> None:
    """transformers' own loop over one padded batch, greedy, to a fixed length, with every thread there is."""
    torch.set_num_threads(os.cpu_count() or 1)
    longest = max(map(len, asked))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in asked])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asked])
    model.generate(
        input_ids=tokens,
        attention_mask=mask,
        max_new_tokens=outputs,
        min_new_tokens=outputs,
        do_sample=False,
        pad_token_id=0,
        **extra,
    )


def seconds(work: Callable[[], Any]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "low": round(min(values), 2), "high": round(max(values), 2)}


def compare(name: str, unit: str, sides: dict[str, Callable[[], float]], rounds: int, results: dict[str, Any]) -> None:
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for side, measure in sides.items():
        measure()  # warm
        del side
    for _ in range(rounds):
        for side, measure in sides.items():
            measured[side].append(measure())
    results[name] = {"unit": unit, **{side: spread(values) for side, values in measured.items()}}
    print(name, json.dumps(results[name]), flush=True)


def arrivals() -> list[tuple[float, list[int], int]]:
    """16 requests of different lengths, one every 0.2 s: when, prompt, outputs."""
    asked = prompts(BATCH, [16, 64, 120, 33])
    return [(0.2 * i, prompt, 24 + 16 * (i % 5)) for i, prompt in enumerate(asked)]


def transformers_server(model: Any, most: int) -> float:
    """Tokens a second of a server that, whenever it is free, takes up to `most` who wait as one padded batch."""
    waiting, started_at, tokens = arrivals(), time.perf_counter(), 0
    while waiting:
        now = time.perf_counter() - started_at
        batch = [entry for entry in waiting if entry[0] <= now][:most]
        if not batch:
            time.sleep(0.005)
            continue
        waiting = waiting[len(batch) :]
        generate(model, [prompt for _, prompt, _ in batch], max(output for _, _, output in batch))
        tokens += sum(output for _, _, output in batch)
    return tokens / (time.perf_counter() - started_at)


def rota_server(service: InProcessService, finished: threading.Semaphore) -> float:
    plan, started_at = arrivals(), time.perf_counter()
    for number, (at, prompt, output) in enumerate(plan):
        time.sleep(max(0.0, started_at + at - time.perf_counter()))
        sampling = SamplingParams(max_new_tokens=output, temperature=0.0)
        request_id = RequestId(f"{started_at}-{number}")
        service.send(
            Request(request_id=request_id, prompt=tuple(prompt), sampling=sampling, arrived_at=time.monotonic())
        )
    for _ in plan:
        finished.acquire()
    return sum(output for _, _, output in plan) / (time.perf_counter() - started_at)


def machine(engine: Engine) -> dict[str, Any]:
    """What the figures depend on."""
    found = this_processor()
    names = re.findall(r"^(?:model name|CPU part)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "architecture": platform.machine(),
        "processor": names[0] if names else "unknown",
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "multiplies": sorted(str(dtype).removeprefix("torch.") for dtype in found.multiplies),
        "4-bit product": found.four_bit,
        "precision": str(chosen_dtype()).removeprefix("torch."),
        "cores": os.cpu_count(),
        "threads": str(engine._threads),
        "torch": torch.__version__,
    }


def chosen_dtype() -> torch.dtype:
    return choose_dtype(ModelConfig(), torch.bfloat16, torch.device("cpu"), this_processor())


def llama_cpp(prompt: list[int]) -> dict[str, Callable[[], float]]:
    """One token after the other by llama.cpp, as its package does it by default; no side if it is not there."""
    if find_spec("llama_cpp") is None:
        return {}
    from llama_cpp import Llama

    model = Llama(str(builtin_source()), n_ctx=256, n_threads=os.cpu_count(), verbose=False)

    def measure() -> float:
        started_at = time.perf_counter()
        for _ in zip(range(OUTPUT), model.generate(prompt, temp=0.0, reset=True), strict=False):
            pass
        return 1000 * (time.perf_counter() - started_at) / OUTPUT

    return {"llama.cpp": measure}


def make_adapters(folder: Path, model: Any) -> dict[str, Path]:
    """Six random adapters of rank 8 on all projections."""
    paths = {}
    for number in range(ADAPTERS):
        config = PeftConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(number)
        tuned = get_peft_model(copy.deepcopy(model), config)
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
        tuned.save_pretrained(folder / f"a{number}")
        paths[f"a{number}"] = folder / f"a{number}"
    return paths


def mixed_model(model: Any, adapters: dict[str, Path]) -> PeftModel:
    (first, path), *others = adapters.items()
    mixed = PeftModel.from_pretrained(copy.deepcopy(model), path, adapter_name=first)
    for name, path in others:
        mixed.load_adapter(path, adapter_name=name)
    return mixed.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = builtin_model_folder(quiet=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=chosen_dtype()).eval()
    params = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    one, many = prompts(1, [PROMPT]), prompts(BATCH, [PROMPT])

    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        adapters = make_adapters(Path(scratch), model)
        names = [f"a{i % ADAPTERS}" for i in range(BATCH)]
        peft = mixed_model(model, adapters)
        llm = LLM(adapters=adapters, quiet=True, enable_prefix_caching=False, device="cpu")
        config = EngineConfig(
            model=ModelConfig(model_path=str(folder), device="cpu"),
            scheduler=SchedulerConfig(enable_prefix_caching=False),
            quiet=True,
        )
        results: dict[str, Any] = {"machine": machine(build_engine(config))}
        print(json.dumps(results), flush=True)
        compare(
            "one at a time",
            "ms a token",
            {
                "transformers": lambda: 1000 * seconds(lambda: generate(model, one, OUTPUT)) / OUTPUT,
                "rota": lambda: 1000 * seconds(lambda: llm.generate(one, params)) / OUTPUT,
                **llama_cpp(one[0]),
            },
            options.rounds,
            results,
        )
        compare(
            "16 at a time",
            "tokens/s",
            {
                "transformers": lambda: BATCH * OUTPUT / seconds(lambda: generate(model, many, OUTPUT)),
                "rota": lambda: BATCH * OUTPUT / seconds(lambda: llm.generate(many, params)),
                "peft, six adapters": lambda: (
                    BATCH * OUTPUT / seconds(lambda: generate(peft, many, OUTPUT, adapter_names=names))
                ),
                "rota, six adapters": lambda: (
                    BATCH * OUTPUT / seconds(lambda: llm.generate(many, params, adapter=names))
                ),
            },
            options.rounds,
            results,
        )
        service, finished = InProcessService(partial(build_engine, config), config), threading.Semaphore(0)

        def deliver(events: list[Event]) -> None:
            for event in events:
                assert isinstance(event, Produced) or not isinstance(event, Finished) or event.fault is None
                if isinstance(event, Finished):
                    finished.release()

        service.start(deliver)
        service.wait_until_ready()
        compare(
            "16 arriving over time",
            "tokens/s",
            {
                "transformers, one by one": lambda: transformers_server(model, 1),
                "transformers, whoever waits": lambda: transformers_server(model, BATCH),
                "rota": lambda: rota_server(service, finished),
            },
            options.rounds,
            results,
        )
        service.stop()
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
