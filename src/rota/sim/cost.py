"""A cost model says how long things take: steps, adapter copies, disk reads."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from rota.core.errors import ConfigError
from rota.core.plan import StepPlan

# ── graphs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Graphs are steps of fixed sizes: a step is padded to the next size, and takes as long as that size does.
#
# A GPU computes a few tokens as fast as one, since it must read all weights in any case. Beyond that the time grows
# with the tokens, and in stairs where kernels cut tokens into tiles. So the time is a curve through measured knots:
#
#     seconds |              /
#             |        __---
#             |-------            tokens of the step, with padding

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


# Whether a server computes prompts and decodes together, or the prompts of a step first and its decodes after them.
Prefill = Literal["mixed", "alone"]


LONG_PROMPT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """A step costs a constant, and a little for each thing in it. All costs are in seconds."""

    name: str
    base_s: float  # any step
    prefill_s: float  # a step with a prompt in it
    lora_s: float  # a step with an adapter in it
    sequence_s: float  # each decoding sequence
    prompt_token_s: float  # each prompt token computed
    context_token_s: float  # each token attended to
    adapter_s: float  # each different adapter
    load_s: float  # an adapter's way from host memory to a slot; copies run one after another
    fetch_s: float  # an adapter's way from disk to host memory
    prefix_pair_s: float = 0.0  # each prompt token with each token before its chunk: a chunk behind a long prefix
    front_s: float = 0.0  # of each request, in the front end: HTTP, text, its way in and its first token's way out
    mask_s: float = 0.0  # a step with a row that follows a grammar; its mask is worked out while the step runs
    mask_row_s: float = 0.0  # each such row
    prefill: Prefill = "mixed"
    graphs: Graphs | None = None  # where steps are padded, and time is no straight line

    def step_s(self, plan: StepPlan) -> float:
        if not plan.chunks:
            return self.seconds(len(plan.decodes), 0, plan.context_tokens, plan.adapters)
        prompt_tokens = plan.prompt_tokens
        pairs = sum(chunk.start * chunk.length for chunk in plan.chunks) if self.prefix_pair_s else 0
        if plan.decodes and self.prefill == "alone":
            # Two steps of the device: the decodes wait until the prompts are done. A plan does not say which adapters
            # are in which part, so all of them count in both.
            context_tokens = sum(chunk.start + chunk.length for chunk in plan.chunks)
            prompts_s = self.seconds(0, prompt_tokens, context_tokens, plan.adapters)
            decodes_s = self.seconds(len(plan.decodes), 0, plan.context_tokens - context_tokens, plan.adapters)
            step_s = prompts_s + decodes_s
        else:
            step_s = self.seconds(len(plan.decodes), prompt_tokens, plan.context_tokens, plan.adapters)
        return step_s + self.prefix_pair_s * pairs if pairs else step_s

    def masks_s(self, rows: int) -> float:
        """What a step takes longer if so many of its rows follow a grammar."""
        return self.mask_s + self.mask_row_s * rows if rows else 0.0

    @property
    def long_prompt_token_s(self) -> float:
        """What a token takes in a step that a long prompt fills."""
        return (self.seconds(0, LONG_PROMPT, 0, 0) - self.base_s) / LONG_PROMPT

    def seconds(self, decodes: int, prompt_tokens: int, context_tokens: int, adapters: int) -> float:
        """How long a step with these counts takes."""
        padded_s = self.graphs.seconds(decodes, prompt_tokens, adapters) if self.graphs else 0.0
        return padded_s + (
            self.base_s
            + (self.prefill_s if prompt_tokens else 0.0)
            + (self.lora_s if adapters else 0.0)
            + self.sequence_s * decodes
            + self.prompt_token_s * prompt_tokens
            + self.context_token_s * context_tokens
            + self.adapter_s * adapters
        )


def read_cost(name: str) -> LinearCost:
    """A cost model that comes with Rota, by name, or one of yours, by path."""
    shipped = files("rota.sim") / "costs"
    path = Path(name) if name.endswith(".toml") else Path(str(shipped / f"{name}.toml"))
    if not path.exists():
        known = sorted(entry.name.removesuffix(".toml") for entry in shipped.iterdir())
        raise ConfigError(f"There is no cost model '{name}'; known are {', '.join(known)}, or give a path to a file.")
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None
    wanted = [one.name for one in fields(LinearCost) if one.name != "name"]
    needed = {one.name for one in fields(LinearCost) if one.default is MISSING and one.name != "name"}
    for problem, names in (("lacks", needed - table.keys()), ("has the unknown", table.keys() - set(wanted))):
        if names:
            raise ConfigError(f"{path} {problem} {', '.join(sorted(names))}; a cost model has {', '.join(wanted)}.")
    prefill = table.pop("prefill", "mixed")
    if prefill not in get_args(Prefill):
        raise ConfigError(f"{path}: prefill must be one of {', '.join(get_args(Prefill))}, not {prefill!r}.")
    graphs = read_graphs(table.pop("graphs"), str(path)) if "graphs" in table else None
    for field, value in table.items():
        if not _is_number(value):
            raise ConfigError(f"{path}: {field} must be a number of seconds of at least 0, not {value!r}.")
    return LinearCost(name=path.stem, prefill=prefill, graphs=graphs, **table)
