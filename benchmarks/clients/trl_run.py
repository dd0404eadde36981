"""Starts a server with a tiny random model, lets TRL train an adapter against it, and shows whose weights answer.

python benchmarks/clients/trl_run.py [--steps N] [--environments FOLDER] [--output FILE]

TRL runs from an environment of its own that also sees this one. TRL refuses to start where vLLM is not installed, and
imports a few of its helpers: the package is there without what it needs to serve.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from run import Client, prepare

from rota.runtime.lifeline import tied

HERE = Path(__file__).parent / "trl"
NEEDS = tuple((HERE / "requirements.txt").read_text().split())
TRL = Client("vllm==0.31.0", NEEDS, (), "")
PORT = 31761
URL = f"http://127.0.0.1:{PORT}"
START_S, RUN_S = 120, 900


@contextmanager
def serving(model: Path, adapters: Path) -> Iterator[None]:
    flags = ("--port", str(PORT), "--max-loras-per-batch", "4", "--max-lora-rank", "8", "--adapter-root", str(adapters))
    server = subprocess.Popen(
        tied([sys.executable, "-m", "rota", "serve", str(model), *flags]),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(server)
        yield
    finally:
        server.terminate()
        server.wait(60)


def wait_for(server: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{URL}/health"):
            return
        time.sleep(0.2)
    sys.exit("The server did not start.")


def run(home: Path, script: str, *arguments: object) -> str:
    """What a script of TRL's environment prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        tied([home / "bin/python", "-W", "ignore", HERE / script, *map(str, arguments)]),
        env=environment, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def summary(lines: list[dict[str, float]], seconds: float) -> dict[str, Any]:
    def median(name: str) -> float:
        return round(statistics.median(line[name] for line in lines if name in line), 4)

    def mean_reward(some: list[dict[str, float]]) -> float:
        return round(statistics.fmean(line["reward"] for line in some), 3)

    fresh = [line["ratio"] for line in lines if line["sample/staleness_mean"] == 0.0]
    return {
        "steps": len(lines),
        "seconds": round(seconds, 1),
        "reward": {"first ten steps": mean_reward(lines[:10]), "last ten steps": mean_reward(lines[-10:])},
        "ratio of fresh samples": fresh,
        "median seconds": {name: median(f"perf/{name}") for name in ("step_s", "weight_sync_s", "weight_sync_pause_s")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--environments", type=Path, help="keep the environment in this folder and use it again")
    parser.add_argument("--output", type=Path, help="the result, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = prepare(TRL, (options.environments or Path(scratch)).resolve())
        model, adapters, log = Path(scratch) / "model", Path(scratch) / "adapters", Path(scratch) / "log.json"
        adapters.mkdir()
        run(home, "tiny_model.py", model)
        with serving(model, adapters):
            began_at = time.monotonic()
            flags = ("--base-url", URL, "--model", model, "--folder", adapters, "--steps", options.steps)
            run(home, "train.py", *flags, "--output", log)
            seconds = time.monotonic() - began_at
            with urllib.request.urlopen(f"{URL}/v1/models") as response:
                served = [one["id"] for one in json.load(response)["data"] if one["parent"]]
            named = [f"{one}={adapters / '.vllm_lora' / one}" for one in (served[0], served[-1])]
            answers = [json.loads(line) for line in run(home, "compare.py", URL, model, *named).splitlines()]
        result = {**summary(json.loads(log.read_text()), seconds), "adapters at the end": served, "answers": answers}
        result["log"] = json.loads(log.read_text())
    print(json.dumps({name: value for name, value in result.items() if name != "log"}, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
