"""A trace is recorded traffic: a line of JSON for every request.

{"at": 0.25, "prompt_tokens": 120, "output_tokens": 64, "adapter": "pirate"}
{"at": 0.31, "prompt": "The capital of France is", "output_tokens": 8}
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rota.core.errors import ConfigError


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: `at` counts from the start; a request without an adapter asks the base model."""

    at: float
    output_tokens: int
    prompt: str | list[int] | None = None
    prompt_tokens: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise ValueError("a line has either prompt or prompt_tokens, and not both")
        if self.prompt is not None and not self.prompt:
            raise ValueError("prompt must not be empty")
        if self.at < 0.0:
            raise ValueError(f"at must not be below 0, not {self.at}")
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


def read_trace(path: Path) -> list[TraceLine]:
    """Every request of a trace in order of time; errors name the number of the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.") from error
    numbered = enumerate(lines, start=1)
    found = [_decode(line, f"{path}, line {number}") for number, line in numbered if line.strip()]
    if not found:
        raise ConfigError(f"{path} is empty, so there would be no requests.")
    return sorted(found, key=lambda line: line.at)


def _decode(line: bytes, place: str) -> TraceLine:
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: {error}.") from error


_DECODER = msgspec.json.Decoder(TraceLine)
