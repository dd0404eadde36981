"""Rota behind Ray Serve: each replica of the deployment runs a `rota serve` and passes requests on to it.

serve run app:build replicas=2 gpus=1 flags="MODEL --lora-paths legal=/adapters/legal"
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rota.runtime.lifeline import tied

if TYPE_CHECKING:
    from ray.serve import Application

START_S, END_S, ANSWER_S = 1800.0, 30.0, 5.0
LOST = 70  # the code with which `rota serve` itself ends when its engine stays down
# Open answers may take so long to end when a replica is told to stop.
DRAIN_S = 60.0
# Rota queues requests itself, so that every adapter gets its turn: Serve must not hold them back.
AT_A_TIME = 10_000
# These are about one connection, and there are two.
OF_A_CONNECTION = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
OWN_FLAGS = ["--host", "127.0.0.1", "--port", "0", "--trusted-proxies", "127.0.0.1"]


class Rota:
    """One replica: a server of its own on a free port that only this machine reaches."""

    def __init__(self, flags: str = "") -> None:
        command = [sys.executable, "-m", "rota", "serve", *shlex.split(flags), *OWN_FLAGS]
        # Serve calls this in a thread that lives as long as the replica. However the replica ends, the server ends.
        self._server = subprocess.Popen(
            tied(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        self._ends = False
        self._session: aiohttp.ClientSession | None = None
        self._url = self._address()
        threading.Thread(target=self._end_with_server, daemon=True).start()

    def _address(self) -> str:
        """Where the server listens, which it says once it is ready. Raises RuntimeError with its words if it ends."""
        found: SimpleQueue[str | None] = SimpleQueue()
        words: deque[str] = deque(maxlen=20)
        assert self._server.stdout is not None
        threading.Thread(target=_listen, args=(self._server.stdout, found, words), daemon=True).start()
        try:
            address = found.get(timeout=START_S)
        except Empty:
            address = None
        if address is None:
            self._server.kill()
            raise RuntimeError("Rota does not start: " + "".join(words))
        return address

    def _end_with_server(self) -> None:
        """Serve replaces a replica that has ended at once, and one that fails its checks only after half a minute."""
        self._server.wait()
        if not self._ends:
            os._exit(LOST)

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back as it comes."""
        target = self._url + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers, body = _kept(request.headers), await request.body()
        try:
            answer = await self._client().request(
                request.method, target, headers=headers, data=body, allow_redirects=False
            )
        except aiohttp.ClientError as error:
            return JSONResponse({"error": {"message": f"This replica's server is gone: {error}"}}, 503)
        return StreamingResponse(_pieces(answer), answer.status, _kept(answer.headers))

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises three times in a row.

        Not /readyz: that is 503 also while Rota starts its engine again, which must not be begun anew.
        """
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        async with self._client().get(f"{self._url}/livez", timeout=limit) as answer:
            answer.raise_for_status()

    def _client(self) -> aiohttp.ClientSession:
        """Made in the event loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, connect=ANSWER_S),  # an answer may wait long, for its turn
                auto_decompress=False,
            )
        return self._session

    def __del__(self) -> None:
        """Serve calls this when a replica ends, after its open answers have ended."""
        self._ends = True
        self._server.terminate()
        try:
            self._server.wait(END_S)
        except subprocess.TimeoutExpired:
            self._server.kill()


def _listen(said: IO[str], found: SimpleQueue[str | None], words: deque[str]) -> None:
    """Copy the server's words to the replica's log, and find its address in them; None: it has ended."""
    for line in said:
        print(line, end="", flush=True)
        words.append(line)
        if line.startswith("Rota serves "):
            found.put(line.split(" at ")[-1].strip())
    found.put(None)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_A_CONNECTION}


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()  # a client that leaves early ends its request in Rota too


def build(args: Mapping[str, str]) -> Application:
    """The application, for `serve run`. `flags` are those of `rota serve`; each replica has `cpus` and `gpus`."""
    from ray import serve

    deployed = serve.deployment(
        name="rota",
        num_replicas=int(args.get("replicas", 1)),
        max_ongoing_requests=AT_A_TIME,
        graceful_shutdown_timeout_s=DRAIN_S + END_S,
        ray_actor_options={"num_cpus": float(args.get("cpus", 1)), "num_gpus": float(args.get("gpus", 0))},
    )
    return deployed(Rota).bind(args.get("flags", ""))
