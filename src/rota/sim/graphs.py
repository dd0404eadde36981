"""Graphs are steps of fixed sizes: a step is padded to the next size, and takes as long as that size does.

A GPU computes a few tokens as fast as one, since it must read all weights in any case. Beyond that the time grows with
the tokens, and in stairs where kernels cut tokens into tiles. So the time is a curve through measured knots:

    seconds |              /
            |        __---
            |-------            tokens of the step, with padding
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rota.core.errors import ConfigError

SIZES = ("decodes", "mixed_decodes", "prompt_tokens", "knots")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """The sizes that have a graph, and what steps cost beyond `LinearCost`'s numbers."""

    decodes: tuple[int, ...]  # of steps that only decode
    mixed_decodes: tuple[int, ...]  # of steps with a prompt in them: each of these with each of `prompt_tokens`
    prompt_tokens: tuple[int, ...]
    knots: tuple[int, ...]  # tokens of a step
    knots_s: tuple[float, ...]  # what so many tokens take, beyond the first
    lora_token_s: float = 0.0  # each token of a step with an adapter in it
    eager_s: float = 0.0  # a step without a graph, kernel by kernel
    eager_lora_s: float = 0.0  # and if there is an adapter in it

    def padded(self, decodes: int, prompt_tokens: int) -> tuple[int, bool]:
        """The tokens that a step computes, and whether it has a graph."""
        if not prompt_tokens:
            size = _next(self.decodes, decodes)
            return (decodes, False) if size is None else (size, True)
        rows, prompt = _next(self.mixed_decodes, decodes), _next(self.prompt_tokens, prompt_tokens)
        if rows is None or prompt is None:
            return decodes + prompt_tokens, False
        return rows + prompt, True

    def seconds(self, decodes: int, prompt_tokens: int, adapters: int) -> float:
        """What a step with these counts takes beyond what `LinearCost` adds up."""
        tokens, has_graph = self.padded(decodes, prompt_tokens)
        seconds = self._curve_s(tokens)
        if adapters:
            seconds += self.lora_token_s * tokens
        if not has_graph:
            seconds += self.eager_s + (self.eager_lora_s if adapters else 0.0)
        return seconds

    def _curve_s(self, tokens: int) -> float:
        """On the straight line between two knots; beyond the last knot, on the last line."""
        place = min(max(bisect_left(self.knots, tokens), 1), len(self.knots) - 1)
        low, high = self.knots[place - 1], self.knots[place]
        part = max(0.0, (tokens - low) / (high - low))
        return self.knots_s[place - 1] + part * (self.knots_s[place] - self.knots_s[place - 1])

    def stairs(self, tokens: int) -> list[float]:
        """How much of each segment of the curve so many tokens have climbed; of the last segment it may exceed 1."""
        climbed = [(tokens - low) / (high - low) for low, high in zip(self.knots, self.knots[1:], strict=False)]
        return [max(0.0, min(1.0, part)) for part in climbed[:-1]] + [max(0.0, climbed[-1])]


def _next(sizes: tuple[int, ...], count: int) -> int | None:
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def read_graphs(table: Any, where: str) -> Graphs:
    """From a table of a cost model's file."""
    names = [one.name for one in fields(Graphs)]
    lists = (*SIZES, "knots_s")
    if not isinstance(table, Mapping) or not set(lists) <= table.keys() <= set(names):
        raise ConfigError(f"{where}: graphs must be a table with {', '.join(lists)}, and of {', '.join(names)} only.")
    for name in lists:
        values = table[name]
        if not isinstance(values, list) or not values or not all(map(_is_number, values)) or values != sorted(values):
            raise ConfigError(f"{where}: graphs.{name} must be a list of numbers that grow, not {values!r}.")
    if len(table["knots"]) != len(table["knots_s"]) or len(set(table["knots"])) < 2:
        raise ConfigError(f"{where}: graphs.knots and graphs.knots_s must be as long, and two at least.")
    for name in table.keys() - set(lists):
        if not _is_number(table[name]):
            raise ConfigError(f"{where}: graphs.{name} must be a number of seconds of at least 0, not {table[name]!r}.")
    numbers: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in table.items()}
    return Graphs(**numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf
