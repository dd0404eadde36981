"""Measures what one front process carries: processor time of the server for a token and for a request.

python benchmarks/front_cost.py [--seconds 12] [--output FILE]

The server is that of `rota serve --data-parallel-size 2`. Its engines are processes around a device that only keeps
time, and its clients are processes that only count. Times are the server's own, by the kernel's books, the least of
several windows: on a machine that others use too, what one window is above another is theirs. A core is full when its
seconds are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from front.paced import paced_device
from front.serving import Served, model_folder, started
from front.ticks import tick_tokens

from rota.commands.serve import serve_model
from rota.core.config import ServerConfig
from rota.llm.config import engine_config
from rota.runtime.lifeline import tied
from rota.text.tokenizer import Tokenizer

REPLICAS, CLIENTS = 2, 2
WINDOWS = 4
SETTLES_S = 6.0  # streams begin, and the server imports and compiles what it needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients ask: so many streams at a time, and a token for each in every step."""

    name: str
    streams: int
    step_s: float
    tokens: int  # of an answer
    prompt_tokens: int = 16


LOADS = (
    Load(name="64 streams, 25 tokens/s each", streams=64, step_s=0.04, tokens=400),
    Load(name="64 streams, 100 tokens/s each", streams=64, step_s=0.01, tokens=1000),
    Load(name="256 streams, 25 tokens/s each", streams=256, step_s=0.04, tokens=400),
    Load(name="256 streams, 100 tokens/s each", streams=256, step_s=0.01, tokens=1000),
    Load(name="answers of 1 token, prompts of 16", streams=16, step_s=0.0, tokens=1),
    Load(name="answers of 1 token, prompts of 512", streams=16, step_s=0.0, tokens=1, prompt_tokens=512),
)


def serve(step_s: float) -> None:
    """Serve until told to stop; prints the address."""
    config = engine_config({"data_parallel_size": REPLICAS}, True)
    tokens = tick_tokens(Tokenizer(model_folder()))
    serve_model(
        config,
        ServerConfig(port=0, allow_anyone=True),
        on_ready=lambda url: print(f"url {url}", flush=True),
        make_device=partial(paced_device, step_s, tokens),
    )


def measure(load: Load, lasts_s: float) -> dict[str, Any]:
    with started([sys.executable, __file__, "--serve", str(load.step_s)]) as served, ExitStack() as stack:
        clients = [stack.enter_context(_client(served, load, number)) for number in range(CLIENTS)]
        time.sleep(SETTLES_S)
        looks = [_look(served, clients)]
        for _ in range(WINDOWS):
            time.sleep(lasts_s / WINDOWS)
            looks.append(_look(served, clients))
        for client in clients:
            client.terminate()
    asked = {"load": load.name, "asked_tokens_per_s": round(load.streams / load.step_s) if load.step_s else None}
    windows = [_window(*pair) for pair in pairwise(looks)]
    return {**asked, **min(windows, key=lambda one: one["us_per_token"]), "windows": windows}


def _window(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    lasted_s, cpu_s, tokens, answers = (after[name] - before[name] for name in ("at", "cpu_s", "events", "answers"))
    return {
        "tokens_per_s": round(tokens / lasted_s),
        "requests_per_s": round(answers / lasted_s, 1),
        "server_cores": round(cpu_s / lasted_s, 3),
        "us_per_token": round(cpu_s / tokens * 1e6, 1),
        "us_per_request": round(cpu_s / answers * 1e6) if answers else None,
    }


def _client(served: Served, load: Load, seed: int) -> subprocess.Popen[str]:
    asked = {"url": served.url, "streams": load.streams // CLIENTS, "tokens": load.tokens, "seed": seed}
    asked["prompt_tokens"] = load.prompt_tokens
    program = Path(__file__).parent / "front" / "counting.py"
    return subprocess.Popen(tied([sys.executable, str(program), json.dumps(asked)]), stdout=subprocess.PIPE, text=True)


def _look(served: Served, clients: list[subprocess.Popen[str]]) -> dict[str, float]:
    """What the server has used and the clients have got, as of the clients' last word."""
    words = [_last_line(client) for client in clients]
    sums = {name: sum(word[name] for word in words) for name in ("events", "answers")}
    spoken_at = sum(word["at"] for word in words) / len(words)
    return {"at": spoken_at, "cpu_s": served.cpu_s()["server"], **sums}


def _last_line(client: subprocess.Popen[str]) -> dict[str, float]:
    """Clients speak ten times a second: a line that was awaited is the last one."""
    assert client.stdout is not None
    while True:
        began_at = time.monotonic()
        word: dict[str, float] = json.loads(client.stdout.readline())
        if time.monotonic() - began_at > 0.01 or time.monotonic() - word["at"] < 0.2:
            return word


def carried(found: list[dict[str, Any]]) -> dict[str, float]:
    """What one full core would carry: tokens by the streams with most of them, requests by the short answers."""
    streams = max((one for one in found if one["asked_tokens_per_s"]), key=lambda one: one["tokens_per_s"])
    short = [one for one in found if not one["asked_tokens_per_s"]]
    return {
        "tokens_per_s": round(1e6 / streams["us_per_token"]),
        **{f"requests_per_s, {one['load']}": round(1e6 / one["us_per_request"]) for one in short},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    parser.add_argument("--serve", type=float, metavar="STEP_S", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    found = []
    for load in LOADS:
        found.append({**measure(load, options.seconds), "load_before": os.getloadavg()[0]})
        print({name: value for name, value in found[-1].items() if name != "windows"}, flush=True)
    print(carried(found))
    if options.output:
        command = f"python benchmarks/front_cost.py --seconds {options.seconds:g}"
        content = {"command": command, "replicas": REPLICAS, "loads": found, "a_full_core_carries": carried(found)}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
