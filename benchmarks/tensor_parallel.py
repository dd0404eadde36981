"""Tensor parallel on one GPU: each rank's compute, two ranks that agree in graphs, and NCCL in a graph.

    python -m benchmarks.tensor_parallel [--output FILE] [--only compute ranks nccl] [--limit SECONDS] [--shape tiny]

Every part is a process of its own with a time limit, and is told as soon as it is known; a part that fails leaves the
others. Two GPUs are not needed: the two ranks share one, which shows that they agree and says nothing of their speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.assets import make_adapter
from benchmarks.h200.shapes import LLAMA_8B, TINY
from rota.runtime.lifeline import tied

ROOT = Path(__file__).parents[1]
SIZES = (1, 2, 4)
SMALL = TINY | {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "num_hidden_layers": 3, "vocab_size": 4096,
}  # fmt: skip
Part = Callable[[Path, argparse.Namespace], Iterator[tuple[str, dict[str, Any]]]]


def compute(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """A rank of each size by itself."""
    is_tiny = options.shape == "tiny"
    config = TINY if is_tiny else LLAMA_8B
    make_model(folder / "model", config)
    make_adapter(folder / "adapter", folder / "model", 16)
    for size in SIZES[: 2 if is_tiny else 3]:
        words = [str(folder), str(size), *(["tiny"] if is_tiny else [])]
        yield f"compute, 1 of {size}", printed("benchmarks.parallel.compute", words, options.limit)


def ranks(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Two ranks on one device beside one rank, in float32 and in bfloat16."""
    make_model(folder / "model", SMALL)
    for number in range(1, 4):
        make_adapter(folder / f"adapter{number}", folder / "model", 2 * number, scale=0.3, dtype=torch.float32)
    for dtype in ("float32", "bfloat16") if torch.cuda.is_available() else ("float32",):
        told = compared(folder, dtype, options.limit)
        yield f"two ranks, {dtype}", told
        if "failed" in told:
            return


def nccl(_folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "NCCL", printed("benchmarks.parallel.nccl", [meeting()], options.limit)


# The surest first.
PARTS: dict[str, Part] = {"compute": compute, "nccl": nccl, "ranks": ranks}


def compared(folder: Path, dtype: str, limit_s: float) -> dict[str, Any]:
    """Run one rank, and two that meet, all at a time; then compare what they answered."""
    at, names = meeting(), {"one": (0, 1), "first": (0, 2), "second": (1, 2)}
    with tempfile.TemporaryDirectory() as scratch:
        outputs = {name: Path(scratch) / name for name in names}
        started = {
            name: start("benchmarks.parallel.rank", [folder, rank, size, at, dtype, outputs[name]], Path(scratch))
            for name, (rank, size) in names.items()
        }
        ended = [end(process, limit_s) for process in started.values()]
        if faults := [fault for fault in ended if fault]:
            return {"failed": faults}
        one, first, second = (json.loads(outputs[name].read_text()) for name in names)
    return agreement(one, first, second)


def agreement(one: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    drawn = list(zip(*(itertools.chain(*run["mixed"]) for run in (first, one)), strict=True))
    rows = list(zip(*one["greedy"], strict=True))
    return {
        "in graphs": first["has_graphs"],
        "ranks agree": first["greedy"] == second["greedy"] and first["mixed"] == second["mixed"],
        "greedy as one rank": first["greedy"] == one["greedy"],
        "tokens as one rank, greedy, drawn and penalised": f"{sum(a == b for a, b in drawn)} of {len(drawn)}",
        "scores differ by at most": max(abs(a - b) for a, b in zip(one["scores"], first["scores"], strict=True)),
        "adapters matter": len(set(rows)) == len(rows),
        "start_s": [run["start_s"] for run in (one, first, second)],
        "greedy_step_ms": [run["greedy_step_ms"] for run in (one, first, second)],
    }


def printed(module: str, words: Sequence[object], limit_s: float) -> dict[str, Any]:
    """What a part prints last, or why it did not."""
    with tempfile.TemporaryDirectory() as scratch:
        process = start(module, words, Path(scratch))
        fault = end(process, limit_s)
        lines = Path(scratch, "log").read_text(errors="replace").splitlines()
    return {"failed": fault} if fault else json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def start(module: str, words: Sequence[object], scratch: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        # Two ranks on one device, which have no multicast.
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    log = (scratch / "log").open("ab")
    process = subprocess.Popen(
        tied([sys.executable, "-m", module, *map(str, words)]),
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    process.log = scratch / "log"  # type: ignore[attr-defined]
    return process


def end(process: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """Wait for a process, and kill it at the limit; why it failed, if it did."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"still running after {limit_s:g} s: {tail(process)}"
    return None if process.returncode == 0 else f"exit {process.returncode}: {tail(process)}"


def tail(process: subprocess.Popen[bytes]) -> str:
    text: str = process.log.read_text(errors="replace")  # type: ignore[attr-defined]
    return text[-3000:]


def meeting() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def make_model(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a part's process")
    parser.add_argument("--shape", choices=("llama-8b", "tiny"), default="llama-8b")
    options = parser.parse_args()
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    results: dict[str, Any] = {"machine": machine, "torch": torch.__version__}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            started_at = time.monotonic()
            for case, told in PARTS[name](Path(folder), options):
                results[case] = told | {"took_s": round(time.monotonic() - started_at, 1)}
                print(case, json.dumps(results[case], indent=1), flush=True)
                if options.output:
                    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
