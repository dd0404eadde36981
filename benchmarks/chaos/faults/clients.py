"""Clients that are slow, that leave, or that are too many."""

from __future__ import annotations

import asyncio
import socket
from random import Random

from ..asks import Ask, Manner, encoded, text
from ..endings import Form
from ..ledger import Allowed
from ..site import BASE
from ..stage import Stage
from .fault import Fault, pause

# Floods come from an address of their own, so that a limit for one address spares the others.
ELSEWHERE = "127.0.0.2"
TOO_MANY = frozenset({429})
_IDLE = 150
_PROMPTS = 20


async def read_slowly(stage: Stage, rng: Random) -> None:
    for _ in range(rng.randint(2, 5)):
        manner = Manner(slow_reads=rng.randint(3, 12), pause_s=rng.uniform(0.05, 0.5))
        stage.begin([stage.drawn(rng, rng.choice(["acme", "beta"]), manner, most_tokens=32)])
    await stage.finish()


async def send_slowly(stage: Stage, rng: Random) -> None:
    """Some of them never send the last piece."""
    for _ in range(rng.randint(3, 6)):
        pieces = rng.randint(3, 9)
        stops_after = rng.randint(1, pieces - 1) if rng.random() < 0.4 else None
        manner = Manner(sends_in=pieces, pause_s=rng.uniform(0.05, 0.4), stops_after=stops_after)
        stage.begin([stage.drawn(rng, rng.choice(["acme", "beta"]), manner)])
    await stage.finish()


async def leave(stage: Stage, rng: Random) -> None:
    """Before the first byte, in the middle of a stream, with a reset or without."""
    for _ in range(rng.randint(4, 10)):
        manner = Manner(leaves_after=rng.choice([0, 0, 1, 2, 4]), leaves_with_reset=rng.random() < 0.5)
        stage.begin([stage.drawn(rng, rng.choice(["acme", "beta", "guest"]), manner, most_tokens=48)])
    await stage.finish()


async def flood_queue(stage: Stage, rng: Random) -> None:
    """More requests than rows and queue together, in many calls or in a few."""
    size = rng.randint(40, 70)
    if rng.random() < 0.5:
        asks = [stage.drawn(rng, "acme", most_tokens=4) for _ in range(size)]
    else:
        # One call may hold no more prompts than may wait.
        body = {"model": BASE, "max_tokens": 4, "prompt": [text(rng, 3) for _ in range(_PROMPTS)]}
        secret = stage.site.secrets["acme"]
        asks = [
            Ask("/v1/completions", secret, encoded(body), Form.OPENAI, _PROMPTS, f"flood-{stage.ledger.round}-{n}")
            for n in range(size // _PROMPTS + 1)
        ]
    await asyncio.gather(*stage.begin(asks))


async def flood_connections(stage: Stage, rng: Random) -> None:
    """Connections that say nothing, or only half a head; the server may close them whenever it likes."""
    idle: list[socket.socket] = []
    try:
        for _ in range(_IDLE):
            connection = socket.socket(socket.AF_INET)
            idle.append(connection)
            connection.setblocking(False)
            connection.bind((ELSEWHERE, 0))
            try:
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", stage.served.port))
                if rng.random() < 0.3:
                    connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            except OSError:
                continue
        await pause(rng, 0.5, 2.0)
        await stage.finish()
    finally:
        for connection in idle:
            connection.close()


async def flood_bodies(stage: Stage, rng: Random) -> None:
    """Bodies beyond the limit, prompts beyond the context, and conversations of very many turns."""
    manner = Manner(from_host=ELSEWHERE)
    secret = stage.site.secrets["beta"]
    large = encoded({"model": BASE, "max_tokens": 1, "prompt": "x" * 3_000_000})
    long = encoded({"model": BASE, "max_tokens": 1, "prompt": "stone " * rng.randint(10_000, 60_000)})
    turns = [{"role": "user", "content": "a"}] * rng.randint(5_000, 20_000)
    tokenize = encoded({"model": BASE, "messages": turns})
    asks = []
    for number in range(rng.randint(3, 6)):
        path, body, form = [
            ("/v1/completions", large, Form.OPENAI),
            ("/v1/completions", long, Form.OPENAI),
            ("/tokenize", tokenize, Form.PLAIN),
        ][number % 3]
        asks.append(Ask(path, secret, body, form, manner=manner, may_get=frozenset({400, 413, 429})))
    await asyncio.gather(*stage.begin(asks))


FAULTS = [
    Fault("slow readers", read_slowly),
    Fault("slow senders", send_slowly),
    Fault("leaving clients", leave),
    Fault("flood of requests", flood_queue, allowed=Allowed(TOO_MANY)),
    Fault("flood of connections", flood_connections),
    Fault("flood of bodies", flood_bodies),
]
