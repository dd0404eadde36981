"""Measures a cold adapter: from the call to its first step, from a folder, from S3, and from the cache on disk.

python benchmarks/cold_adapters.py [--rank 8] [--repeats 10] [--output FILE]

The S3 server is moto's, in a process of its own on this machine. The engine is the built-in model's on a CPU; times are
of `LLM.load_adapter`, of a first answer of one token, which copies the adapter into a slot and computes a step, and of
an answer after that, which only computes. So the first step begins after the load and what the first answer takes
longer. The processor's time of this process stands beside it: on a busy machine it says more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import obstore
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rota import LLM
from rota.core.request import SamplingParams
from rota.engine.folders.builtin import builtin_model_folder
from rota.runtime.lifeline import tied

BUCKET = "adapters"
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)
# Seconds of the load, of the first answer, and of the next.
Stages = tuple[float, float, float]
Cold = tuple[Stages, Stages]  # of the clock on the wall, and of the processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rota-cold-") as folder, s3_server():
        report = measure(Path(folder), options.rank, options.repeats)
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", "utf-8")


def measure(folder: Path, rank: int, repeats: int) -> dict[str, Any]:
    adapter = make_adapter(folder / "adapter", rank)
    size = (adapter / "adapter_model.safetensors").stat().st_size
    llm = LLM(quiet=True, max_lora_rank=rank, max_loras_per_batch=4, adapter_cache_dir=str(folder / "cache"))
    llm.generate("Hello", ONE_TOKEN, adapter="pirate")
    times: dict[str, list[Cold]] = {"disk": [], "s3": [], "cache": []}
    for number in range(repeats):
        address = upload(adapter, f"cold-{number}")
        for kind, path in (("disk", str(adapter)), ("s3", address), ("cache", address)):
            times[kind].append(cold(llm, f"{kind}-{number}", path))
    return {
        "machine": f"{os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}",
        "megabytes": round(size / 1e6, 1),
        "milliseconds": {
            kind: {"elapsed": medians(wall for wall, _ in measured), "processor": medians(cpu for _, cpu in measured)}
            for kind, measured in times.items()
        },
    }


def medians(measured: Iterable[Stages]) -> dict[str, float]:
    loads, firsts, warms = zip(*measured, strict=True)
    to_first_step = [load + first - warm for load, first, warm in zip(loads, firsts, warms, strict=True)]
    named = {"loaded": loads, "first_answer": firsts, "next_answer": warms, "to_first_step": to_first_step}
    found = {name: round(statistics.median(values) * 1e3, 1) for name, values in named.items()}
    return found | {"least_to_first_step": round(min(to_first_step) * 1e3, 1)}


def cold(llm: LLM, name: str, path: str) -> Cold:
    """Prompts are of one length, and none begins like another: each is computed as a whole."""
    marks = [(time.perf_counter(), time.process_time())]
    for act in (
        partial(llm.load_adapter, name, path),
        partial(llm.generate, "Hello", ONE_TOKEN, adapter=name),
        partial(llm.generate, "World", ONE_TOKEN, adapter=name),
    ):
        act()
        marks.append((time.perf_counter(), time.process_time()))
    wall, cpu = ([after - before for before, after in pairwise(clock)] for clock in zip(*marks, strict=True))
    return (wall[0], wall[1], wall[2]), (cpu[0], cpu[1], cpu[2])


def make_adapter(folder: Path, rank: int) -> Path:
    model = AutoModelForCausalLM.from_pretrained(builtin_model_folder(quiet=True))
    get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear")).save_pretrained(folder)
    return folder


def upload(adapter: Path, name: str) -> str:
    store = obstore.store.S3Store(BUCKET, client_options={"allow_http": True})
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        obstore.put(store, f"{name}/{file}", (adapter / file).read_bytes())
    return f"s3://{BUCKET}/{name}"


@contextmanager
def s3_server() -> Iterator[None]:
    """moto's server, and the environment of its clients."""
    program = (
        "from moto.server import ThreadedMotoServer as S; import time; s = S('127.0.0.1', 0, False); s.start(); "
        "print(s.get_host_and_port()[1], flush=True); time.sleep(10**6)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(tied(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            keys = {"AWS_ACCESS_KEY_ID": "measure", "AWS_SECRET_ACCESS_KEY": "measure", "AWS_REGION": "us-east-1"}
            os.environ.update(keys, AWS_ENDPOINT_URL=url, AWS_ALLOW_HTTP="true")
            httpx.put(f"{url}/{BUCKET}").raise_for_status()
            yield
        finally:
            server.kill()


if __name__ == "__main__":
    main()
