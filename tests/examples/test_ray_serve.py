"""Rota behind Ray Serve: answers come as Rota gives them, and no server outlives its replica."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI
from starlette.requests import Request
from starlette.responses import Response

from examples.builtin_adapters.styles import STYLES
from examples.ray_serve.app import Rota
from tests.engine.model_factory import make_tiny_model
from tests.processes import Program, marked, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

QUESTION = "Why do we sleep?"
FOLDER = Path(__file__).parents[2] / "examples/ray_serve"
needs_serve = pytest.mark.skipif(
    # What `import ray.serve` needs beside Ray itself.
    not all(map(find_spec, ("ray", "grpc", "opencensus"))),
    reason="runs Ray Serve, which `pip install 'ray[serve]'` brings with thirty packages that nothing else here needs",
)


def asked(path: str, **body: Any) -> Request:
    """A request as Serve hands it to a replica."""
    scope = {
        "type": "http",
        "method": "POST" if body else "GET",
        "path": path,
        "query_string": b"",
        "server": ("serve.example", 8000),
        "headers": [(b"host", b"serve.example:8000"), (b"content-type", b"application/json")],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode() if body else b""}

    return Request(scope, receive)


async def read(answer: Response) -> list[bytes]:
    return [piece async for piece in answer.body_iterator]


async def pass_requests_on(rota: Rota) -> None:
    await rota.check_health()
    answer = await rota(asked("/v1/completions", model="tiny", prompt="x", max_tokens=4, stream=True))
    pieces = await read(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert pieces[-1].endswith(b"data: [DONE]\n\n")

    refused = await rota(asked("/v1/completions", model="nobody", prompt="x"))
    assert refused.status_code == 404
    assert b"nobody" in b"".join(await read(refused))


async def leave_early(rota: Rota) -> None:
    """No machine computes so many tokens before the client has read one: it comes by itself."""
    answer = await rota(
        asked("/v1/completions", model="tiny", prompt="x", max_tokens=30_000, ignore_eos=True, stream=True)
    )
    assert b"[DONE]" not in await anext(answer.body_iterator)
    await answer.body_iterator.aclose()
    async with asyncio.timeout(TIMEOUT_S):
        while b'outcome="abort"} 1' not in b"".join(await read(await rota(asked("/metrics")))):
            await asyncio.sleep(0.01)  # between two looks


@pytest.mark.long("starts a server")
def test_a_replica_passes_answers_on_piece_by_piece_and_ends_its_server_when_it_ends(tmp_path, monkeypatch):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    make_tiny_model(folder, "smollm2", max_position_embeddings=2**15)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ROTA_TEST_MARK", mark)
    rota = Rota(f"{folder} --device cpu --quiet --kv-blocks 2048")

    async def ask() -> None:
        await pass_requests_on(rota)
        await leave_early(rota)
        await rota._client().close()

    asyncio.run(ask())
    assert marked(mark)
    rota.__del__()
    assert until(lambda: not marked(mark))  # a tracker of Python ends after its server


def test_a_replica_whose_server_cannot_start_says_why():
    with pytest.raises(RuntimeError, match=r"Rota does not start: rota: Cannot read .*nowhere"):
        Rota("--api-key-file /nowhere/keys.toml")


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def serve_run(tmp_path: Path, mark: str) -> Iterator[tuple[str, Program]]:
    """Two replicas on a Ray of their own, started as the example says, but on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = "--max-lora-rank 8 --max-loras-per-batch 3 --device cpu"
    application = {"name": "rota", "import_path": "app:build", "args": {"replicas": "2", "flags": flags}}
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "ray.serve.scripts", "run", tmp_path / "config.yaml"]
    path, said = os.pathsep.join(filter(None, [str(FOLDER), *sys.path])), tmp_path / "said"
    # Ray's sockets need a short path. From there no other Ray of this machine is found.
    with tempfile.TemporaryDirectory(prefix="ray") as folder, said.open("w") as log:
        own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "ROTA_TEST_MARK": mark}
        environment = {**os.environ, **own, "PYTHONPATH": path}
        with started(command, stdout=log, stderr=log, env=environment) as program:
            try:
                url = f"http://127.0.0.1:{port}"
                assert until(lambda: is_ready(url), within_s=2 * TIMEOUT_S), said.read_text()
                yield url, program
            finally:
                for pid in marked(mark):
                    os.kill(pid, signal.SIGKILL)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def servers(mark: str) -> set[int]:
    return {pid for pid in marked(mark) if b"\0rota\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def answered(client: OpenAI, adapter: str) -> list[str]:
    """An adapter's answer, by its pieces."""
    talk = [{"role": "user", "content": QUESTION}]
    told = client.chat.completions.create(model=adapter, messages=talk, max_tokens=64, temperature=0, stream=True)
    return [piece.choices[0].delta.content or "" for piece in told if piece.choices]


@needs_serve
@pytest.mark.long("Starts Ray, Serve and the built-in model twice, and once more after a server is killed.")
def test_serve_streams_adapters_answers_replaces_a_replica_without_server_and_leaves_nothing(serve_run, mark):
    url, program = serve_run
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    for adapter in ("pirate", "haiku"):
        pieces = answered(client, adapter)
        assert len(pieces) > 5
        assert STYLES[adapter].check(QUESTION, "".join(pieces))
    with pytest.raises(NotFoundError, match="nobody"):
        answered(client, "nobody")

    assert until(lambda: len(servers(mark)) == 2)
    killed = min(servers(mark))
    os.kill(killed, signal.SIGKILL)
    assert until(lambda: len(servers(mark)) == 2 and killed not in servers(mark))
    assert STYLES["pirate"].check(QUESTION, "".join(answered(client, "pirate")))

    program.send_signal(signal.SIGINT)
    program.wait(TIMEOUT_S)
    assert until(lambda: not marked(mark))
