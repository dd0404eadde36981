"""Measures what `rota bench` itself costs: 64 streams at 100 tokens a second from a server that does nothing else.

python benchmarks/client_cost.py [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rota.bench.config import BenchConfig
from rota.bench.run import bench
from rota.runtime.lifeline import tied

STREAMS = 64
TOKENS = 1000
STEP_S = 0.01
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


class BareServer:
    """HTTP with nothing behind it: every stream gets the same bytes at the same moment."""

    def __init__(self) -> None:
        choice = {"index": 0, "text": " the", "logprobs": None, "finish_reason": None}
        event = {"id": "cmpl-0123456789", "object": "text_completion", "created": 0, "model": "base"}
        usage = {"prompt_tokens": 1, "completion_tokens": TOKENS}
        self._token = _packet(_event({**event, "choices": [choice]}))
        last = _event({**event, "choices": [{**choice, "finish_reason": "length"}], "usage": usage})
        self._end = _packet(last + b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._open: dict[asyncio.StreamWriter, tuple[int, asyncio.Future[None]]] = {}

    async def run(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        at = time.monotonic()
        while True:
            at += STEP_S
            await asyncio.sleep(at - time.monotonic())
            for writer, (left, done) in list(self._open.items()):
                writer.write(self._token if left > 1 else self._end)
                self._open[writer] = (left - 1, done)
                if left == 1:
                    del self._open[writer]
                    done.set_result(None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    models = json.dumps({"data": [{"id": "base"}]}).encode()
                    writer.write(CHUNKED % b"application/json" + _packet(models) + b"0\r\n\r\n")
                    continue
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                writer.write(CHUNKED % b"text/event-stream")
                done = asyncio.get_running_loop().create_future()
                self._open[writer] = (TOKENS, done)
                await done
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _packet(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def measure() -> dict[str, object]:
    with subprocess.Popen(tied([sys.executable, __file__, "--serve"]), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        config = BenchConfig(
            port=int(server.stdout.readline()),
            dataset_name="random-ids",
            num_prompts=STREAMS,
            random_input_len=512,
            random_output_len=TOKENS,
            random_range_ratio=1.0,
            warmup_requests=0,
        )
        began_at, began_cpu = time.monotonic(), time.process_time()
        found = asyncio.run(bench(config, lambda _: lambda: None)).report()
        wall_s, cpu_s = time.monotonic() - began_at, time.process_time() - began_cpu
        server.terminate()
    return {
        "command": "python benchmarks/client_cost.py",
        "cores": os.cpu_count(),
        "streams": STREAMS,
        "tokens": found["output_tokens"],
        "failed": found["failed"],
        "cpu_us_per_token": round(cpu_s / found["output_tokens"] * 1e6, 1),
        "cpu_share": round(cpu_s / wall_s, 3),
        "itl_ms": {name: round(value * 1e3, 2) for name, value in found["itl_s"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(BareServer().run())
    found = measure()
    print(json.dumps(found, indent=1))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
