"""Measures how long a server takes from its command to its first answer, and to answer again when its engine is killed.

    python -m benchmarks.h200.starts [--adapters 6,16,200] [--rounds 2] [--folder FOLDER] [--out FOLDER] [--shape tiny]
                                     [--serves 10]

Each number of adapters is a server of its own, with the flags' defaults; the first start of all may compile kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from .__main__ import prepare, say, server_options
from .over_http import HttpServer
from .server import Asked
from .shapes import SHAPES, Shape

LIMIT_S = 300.0
LOOK_EVERY_S = 0.02


def measure(
    folder: Path, out: Path, shape: Shape, adapters: int, given: Sequence[str], serves_s: float
) -> dict[str, Any]:
    """One server: its start, and its engine's end after so long; until then a spare process imports."""
    options = server_options(shape, "disk", given)
    del options["max_lora_rank"]
    options["max_loras_per_batch"] = "auto"
    label = f"start-{adapters}"
    server = HttpServer(Asked(folder, options, shape.config["vocab_size"], adapters, label), out)
    try:
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            first_s = server.start_s + answered_s(client, f"adapter{adapters}")
            info = client.get("/server_info").raise_for_status().json()
            time.sleep(serves_s)
            os.kill(info["replicas"][0]["pid"], signal.SIGKILL)
            again_s = answered_s(client, "adapter1")
            after = client.get("/server_info").raise_for_status().json()["replicas"][0]
        return {
            "adapters": adapters,
            "ready_s": round(server.start_s, 2),
            "first_answer_s": round(first_s, 2),
            "answers_again_s": round(again_s, 2),
            "slots": info["max_loras_per_batch"],
            "start": after["start"],
            "restart": after["restart"],
            "peak_rss_gb": server.peak_rss_gb(),
        }
    finally:
        server.stop()


def answered_s(client: httpx.Client, adapter: str) -> float:
    """Until a request of one token is answered; whoever is refused asks again."""
    begun_at = time.monotonic()
    body = {"model": adapter, "prompt": [1, 2, 3], "max_tokens": 1}
    while time.monotonic() < begun_at + LIMIT_S:
        if client.post("/v1/completions", json=body).status_code == 200:
            return time.monotonic() - begun_at
        time.sleep(LOOK_EVERY_S)
    raise TimeoutError(f"No answer within {LIMIT_S:g} s.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", default="6,16,200")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("h200-starts"))
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument(
        "--serves",
        type=float,
        default=25.0,
        help="seconds until the engine is killed: a spare starts late where cores are few, and imports",
    )
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of every server, as JSON")
    asked = parser.parse_args(arguments)
    shape = SHAPES[asked.shape]
    folder = asked.folder or Path(tempfile.gettempdir()) / f"rota-{shape.name}"
    facts = prepare(folder, shape, has_weights=True)
    rows = []
    for adapters in map(int, asked.adapters.split(",")):
        for _ in range(asked.rounds):
            rows.append(measure(folder, asked.out, shape, adapters, asked.set, asked.serves))
            say(json.dumps(rows[-1]))
    (asked.out / "starts.json").write_text(json.dumps({**facts, "starts": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
