"""Measures what an adapter costs that is registered and not used: seconds of the start, and bytes of both processes.

python benchmarks/registered_adapters.py [--adapters 10000] [--repeats 3] [--output FILE]

A server of the built-in model is started with a few adapters and with many, in turns. All are links to one folder's
files, so their headers are checked as those of one recipe are. On a busy machine compare the processors' seconds, and
how soon the engine's process began: the start itself takes as long as others let it.

The engine's own memory differs by some MB from start to start. So the bytes of all records of an adapter are counted
beside it, in this process: those of an adapter that a client loads over HTTP, and was not there at the start.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.events import AdapterAdded, Event, HostChanged, HostState
from rota.core.ids import AdapterId, EngineId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AdapterFetched, AddAdapter, Message
from rota.core.plan import StepResult
from rota.engine.folders.builtin import builtin_adapters
from rota.observe.metrics import Metrics
from rota.runtime.lifeline import tied
from rota.runtime.promises import Promises
from rota.runtime.registry import Registry
from rota.runtime.replicas.desk import ReplicaDesk
from rota.runtime.replicas.roster import Roster
from rota.runtime.replicas.router import Router
from rota.runtime.service import Deliver, Service, ServicePhase, ServiceState
from rota.runtime.spool import Spool
from rota.runtime.wire import decode, encode
from rota.scheduler import Scheduler
from rota.server.adapters.listing import Listing
from rota.server.adapters.manager import AdapterManager

FEW = 10
TIMEOUT_S = 300.0
# Until what is read idly is read, though other work delays it.
SETTLING_S = 5.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Places of numbers in /proc/PID/stat, behind the process's name and state.
USER, SYSTEM, BEGAN = 10, 11, 18

Run = dict[str, float]


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
    few, many = write_config(folder, FEW), write_config(folder, adapters)
    rounds = [(start(few), start(many)) for _ in range(repeats)]
    return {
        "machine": f"{os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}",
        "adapters": adapters,
        **compared(rounds, adapters - FEW),
        "bytes_of_records": {
            "server": server_bytes(adapters),
            "server_with_replicas": {replicas: replicas_bytes(adapters, replicas) for replicas in (2, 8)},
            "scheduler": scheduler_bytes(adapters),
        },
        "rounds": rounds,
    }


def compared(rounds: Sequence[tuple[Run, Run]], more: int) -> dict[str, Any]:
    """Medians: of bytes those of one adapter more, of all else both."""
    few, many = (
        {name: statistics.median(run[name] for run in runs) for name in runs[0]} for runs in zip(*rounds, strict=True)
    )
    each = {name: round((many[name] - few[name]) / more) for name in few if name.endswith("_bytes")}
    both = {name: {"few": round(few[name], 2), "many": round(many[name], 2)} for name in few if name not in each}
    return {"bytes_per_adapter": {**each, "both": sum(each.values())}, **both}


def server_bytes(adapters: int) -> int:
    """What the server's process keeps of an adapter that a client loaded."""
    registry = Registry("base", "/base")
    promises, metrics = Promises(), Metrics(registry.name_of)
    manager = AdapterManager(cast(Service, None), registry)
    listing = Listing(registry, manager, Spool())

    def add(number: int) -> None:
        adapter = registry.add(_asked(number))
        promises.note_message(AddAdapter(adapter=adapter, at=0.0))
        held = HostChanged(at=0.0, adapter_id=adapter.adapter_id, state=HostState.HELD, size_bytes=1 << 20)
        events = [AdapterAdded(adapter.adapter_id, 0.0), held]
        for hear in (promises.note_events, listing.observe, metrics.observe, manager.observe):
            hear(events)

    return bytes_of(add, adapters)


def replicas_bytes(adapters: int, replicas: int) -> int:
    """The same of a server with several replicas, of which each reads the adapter and drops it for the next."""
    registry = Registry("base", "/base")
    metrics, manager = Metrics(registry.name_of), AdapterManager(cast(Service, None), registry)
    listing, engines = Listing(registry, manager, Spool()), [Replica() for _ in range(replicas)]
    desk = ReplicaDesk(Roster(engines), Router(replicas))

    def add(number: int) -> None:
        adapter = registry.add(_asked(number))
        desk.send(AddAdapter(adapter=adapter, at=0.0))
        for engine_id, engine in enumerate(engines):
            events = list(_news(adapter.adapter_id, EngineId(engine_id)))
            engine.promises.note_events(events)
            told = desk.note(engine_id, events)
            for hear in (listing.observe, metrics.observe, manager.observe):
                hear(told)

    return bytes_of(add, adapters)


def _news(adapter_id: AdapterId, engine_id: EngineId) -> Iterator[Event]:
    yield AdapterAdded(adapter_id, 0.0, engine_id)
    for state in (HostState.HELD, HostState.GONE):
        yield HostChanged(at=0.0, adapter_id=adapter_id, state=state, size_bytes=1 << 20, engine_id=engine_id)


class Replica:
    """Stands in for an engine under its supervisor: what the server keeps of it."""

    state = ServiceState(phase=ServicePhase.READY, has_served=True)

    def __init__(self) -> None:
        self.promises = Promises()

    def send(self, message: Message) -> None:
        self.promises.note_message(message)

    def start(self, deliver: Deliver) -> None: ...

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        raise NotImplementedError(timeout_s)

    def stop(self) -> None: ...


def scheduler_bytes(adapters: int) -> int:
    """What the engine's scheduler keeps of an adapter that came over the wire, was read and left host memory."""
    capacity = Capacity(blocks=64, block_size=16, rows=4, max_sequence_tokens=512, slots=4)
    scheduler = Scheduler.from_config(EngineConfig(), capacity)
    registry = Registry("base", "/base")
    sent = [encode([AddAdapter(adapter=registry.add(_asked(number)), at=0.0)]) for number in range(adapters)]

    def add(number: int) -> None:
        (message,) = decode(sent[number])
        scheduler.apply(message)
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, StepResult(at=0.0))
        for adapter in plan.reads:
            scheduler.apply(AdapterFetched(adapter_id=adapter.adapter_id, at=0.0))

    return bytes_of(add, adapters)


def _asked(number: int) -> LoraPath:
    return LoraPath(name=f"a-{number:05}", path=f"/adapters/a-{number:05}")


def bytes_of(add: Callable[[int], None], adapters: int) -> int:
    """What stays of each, in the mean."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(adapters):
            add(number)
        return round((tracemalloc.get_traced_memory()[0] - before) / adapters)
    finally:
        tracemalloc.stop()


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


def start(config: Path) -> Run:
    """Start a server, ask it once, and look at it."""
    began_at = time.monotonic()
    with serving(config) as (process, url):
        ready_s = time.monotonic() - began_at
        engine = max(children_of(process.pid), key=memory_of)
        seconds = {"server_cpu_s": cpu_of(process.pid), "engine_cpu_s": cpu_of(engine)}
        ask(url)
        time.sleep(SETTLING_S)
        return {
            "ready_s": ready_s,
            "engine_began_s": (stat_of(engine)[BEGAN] - stat_of(process.pid)[BEGAN]) / TICKS_PER_S,
            **seconds,
            "server_bytes": memory_of(process.pid),
            "engine_bytes": memory_of(engine),
            "metrics_kb": len(urllib.request.urlopen(f"{url}/metrics").read()) / 1000,
            "models_s": took(f"{url}/v1/models"),
            "adapters_s": took(f"{url}/v1/adapters"),
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
            process.wait(TIMEOUT_S)


def ask(url: str) -> None:
    body = json.dumps({"model": "adapter-00007", "prompt": "Hello", "max_tokens": 2}).encode()
    headers = {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)).read()


def took(url: str) -> float:
    """Seconds until the whole answer is here."""
    began_at = time.monotonic()
    urllib.request.urlopen(url).read()
    return time.monotonic() - began_at


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def stat_of(pid: int) -> list[int]:
    """The numbers behind a process's name and state."""
    return [int(word) for word in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:]]


def cpu_of(pid: int) -> float:
    return sum(stat_of(pid)[place] for place in (USER, SYSTEM)) / TICKS_PER_S


def memory_of(pid: int) -> int:
    """Its own memory: what it shares with no other process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main()
