"""Measures what an adapter costs that is registered and not used: seconds of the start, and bytes of both processes.

python benchmarks/registered_adapters.py [--adapters 10000] [--repeats 3] [--output FILE]

A server of the built-in model is started with a few adapters and with many, in turns. All are links to one folder's
files, so their headers are checked as those of one recipe are. The engine's own memory differs by 100 MB from start to
start, so what its scheduler keeps of an adapter is counted beside it, in this process.
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
import tracemalloc
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter
from rota.core.plan import StepResult
from rota.engine.folders.builtin import builtin_adapters
from rota.runtime.lifeline import tied
from rota.scheduler import Scheduler

FEW = 10
PATIENCE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rota-registered-") as folder:
        report = measure(Path(folder), options.adapters, options.repeats)
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", "utf-8")


def measure(folder: Path, adapters: int, repeats: int) -> dict[str, Any]:
    counts = (FEW, adapters)
    configs = {count: write_config(folder, count) for count in counts}
    runs = {count: [start(configs[count]) for _ in range(repeats)] for count in counts}
    few, many = (
        {name: statistics.median(run[name] for run in runs[count]) for name in runs[FEW][0]} for count in counts
    )
    more = adapters - FEW
    return {
        "machine": f"{os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}",
        "adapters": adapters,
        "bytes_per_adapter": {name: round((many[name] - few[name]) / more) for name in few if name.endswith("_bytes")},
        "scheduler_bytes_per_adapter": scheduler_bytes(adapters),
        "start_s": {"few": round(few["ready_s"], 2), "many": round(many["ready_s"], 2)},
        "metrics_bytes": {"few": few["page"], "many": many["page"]},
        "runs": runs,
    }


def scheduler_bytes(adapters: int) -> int:
    """What the engine's scheduler keeps of an adapter that came over the wire and has no requests."""
    ids = range(1, adapters + 1)
    sent = [
        msgspec.msgpack.encode(Adapter(adapter_id=AdapterId(at), name=f"a-{at:05}", path=f"/b/a-{at:05}")) for at in ids
    ]
    capacity = Capacity(blocks=64, block_size=16, rows=4, max_sequence_tokens=512, slots=4)
    scheduler = Scheduler.from_config(EngineConfig(), capacity)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for one in sent:
        adapter = msgspec.msgpack.decode(one, type=Adapter)
        scheduler.apply(AddAdapter(adapter=adapter, at=0.0, is_read_later=True))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, StepResult(at=0.0))
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return round((after - before) / adapters)


def write_config(folder: Path, count: int) -> Path:
    """A file of flags that names `count` adapters."""
    source = builtin_adapters()["pirate"]
    paths = []
    for number in range(count):
        adapter = folder / f"adapter-{number:05}"
        if not adapter.exists():
            adapter.mkdir()
            for file in source.iterdir():
                (adapter / file.name).symlink_to(file)
        paths.append(str(adapter))
    config = folder / f"{count}.toml"
    config.write_text(f"lora_paths = {json.dumps(paths)}\nport = 0\nmax_lora_rank = 16\nmax_loras_per_batch = 4\n")
    return config


def start(config: Path) -> dict[str, float]:
    """Start a server, ask it once, and look at it."""
    began_at = time.monotonic()
    with serving(config) as (process, url):
        ready_s = time.monotonic() - began_at
        ask(url)
        time.sleep(5.0)  # until what is read idly is read
        engines = children_of(process.pid)
        page = len(urllib.request.urlopen(f"{url}/metrics").read())
        return {
            "ready_s": ready_s,
            "server_bytes": memory_of(process.pid),
            "engine_bytes": max(map(memory_of, engines)),
            "page": page,
        }


@contextmanager
def serving(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "rota", "serve", "--config", str(config), "--quiet", "--max-loaded-loras", "4"]
    with subprocess.Popen(tied(command), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("Rota serves "):
                    yield process, line.split()[-1].rstrip("/")
                    return
            raise SystemExit("The server ended before it served.")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def ask(url: str) -> None:
    body = json.dumps({"model": "adapter-00007", "prompt": "Hello", "max_tokens": 2}).encode()
    headers = {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)).read()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or all_children(pid)


def all_children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def memory_of(pid: int) -> int:
    """Its own memory: what it shares with no other process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main()
