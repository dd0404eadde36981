"""An ask is one HTTP request and the manner of its client; both are drawn from a seeded source before it is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .endings import Form


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client sends and reads. Numbers of pieces are small, so that a slow client is slow and not endless."""

    sends_in: int = 1  # pieces of the body, with a pause between two
    stops_after: int | None = None  # pieces after which it sends no more and leaves
    pause_s: float = 0.0  # between two pieces, and between two reads
    slow_reads: int = 0  # reads with a pause before each; then it reads as fast as it can
    leaves_after: int | None = None  # reads after which it leaves
    leaves_with_reset: bool = False
    from_host: str | None = None  # another address of this machine

    @property
    def leaves(self) -> bool:
        return self.stops_after is not None or self.leaves_after is not None


PATIENT = Manner()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `may_get` are statuses beside 200 that its sender provokes, whatever else happens."""

    path: str
    secret: str | None = None
    body: bytes | None = None
    form: Form = Form.PLAIN
    choices: int = 1
    name: str = ""
    delay_s: float = 0.0
    manner: Manner = PATIENT
    may_get: frozenset[int] = field(default_factory=frozenset)

    @property
    def head(self) -> bytes:
        lines = [f"{'GET' if self.body is None else 'POST'} {self.path} HTTP/1.1", "Host: 127.0.0.1"]
        lines += ["Connection: close", f"Content-Length: {len(self.body or b'')}"]
        if self.secret:
            lines.append(f"Authorization: Bearer {self.secret}")
        if self.name:
            lines.append(f"X-Request-Id: {self.name}")
        if self.body is not None:
            lines.append("Content-Type: application/json")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


WORDS = ("the", "moon", "a", "boat", "why", "rain", "makes", "stars", "sing", "of", "old", "stones", "and", "salt")


def text(rng: Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def drawn_ask(
    rng: Random, secret: str, model: str, name: str = "", most_tokens: int = 16, manner: Manner = PATIENT
) -> Ask:
    """A request to one of the generating routes, whole or streamed, with one answer or several."""
    route = rng.choice(["chat", "completions", "generate"])
    is_streamed = rng.random() < 0.7
    tokens, words = rng.randint(1, most_tokens), rng.randint(1, 40)
    common = {"temperature": 0.0 if rng.random() < 0.5 else 0.8, "ignore_eos": rng.random() < 0.5}
    choices = 1
    if route == "generate":
        body: dict[str, Any] = {"text": text(rng, words), "lora_path": model, "stream": is_streamed}
        body["sampling_params"] = {"max_new_tokens": tokens, **common}
        path, form = "/generate", Form.NATIVE
    else:
        choices = rng.choice([1, 1, 2])
        body = {"model": model, "max_tokens": tokens, "n": choices, "stream": is_streamed, **common}
        path, form = "/v1/chat/completions", Form.OPENAI
        if route == "chat":
            body["messages"] = [{"role": "user", "content": text(rng, words)}]
        else:
            prompts = rng.choice([1, 1, 3])
            body["prompt"] = [text(rng, words) for _ in range(prompts)]
            path, choices = "/v1/completions", choices * prompts
    if manner.slow_reads and form is Form.OPENAI:
        # Larger events: a short answer would fit into the buffers of the kernel.
        body |= {"logprobs": True, "top_logprobs": 20} if route == "chat" else {"logprobs": 5}
    delay_s = round(rng.uniform(0.0, 1.5), 3)
    return Ask(path, secret, encoded(body), form, choices, name, delay_s, manner)
