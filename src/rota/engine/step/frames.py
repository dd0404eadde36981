"""A frame gives the inputs of a step a fixed size, so that a captured graph always finds them in one place.

    decodes only   rows  lengths | places  blocks          each as long as the frame has decodes

    mixed          rows  lengths | token_ids  positions  token_rows | last  sampled_rows  sampled_lengths | chunk_rows …
                   decodes, each |       prompt tokens, each        |         sampled, each               | chunks, each

`lengths` are tokens attended to, the new one included. `places` are where the page tables change, `blocks` to what.
`last` are, among all tokens of the step, those of chunks whose logits are wanted; `sampled_rows` are the rows of these
chunks, and `sampled_lengths` how many tokens each row knows.

What a step does not fill is padding: the padding row's, which reads and writes only the scratch block. A step that fits
into no frame worth a graph has one of its own, without padding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rota.core.plan import StepPlan

# ── sections ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Sections are named runs of numbers in one array: said once, packed on the host, unpacked on the device.

Numbers = NDArray[np.int32]


class FrameLayout:
    """Names and sizes of the sections, in the order in which they lie."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self.numbers = sum(sizes.values())

    def pack(self, values: Mapping[str, Numbers], padding: Mapping[str, int]) -> Numbers:
        """One array; what a section's values leave of its size is filled with the section's padding."""
        line = np.empty(self.numbers, np.int32)
        end = 0
        for name, size in self._sizes.items():
            section, start, end = values[name], end, end + size
            line[start : start + len(section)] = section
            if len(section) < size:
                line[start + len(section) : end] = padding[name]
        return line

    def unpack(self, line: Tensor) -> dict[str, Tensor]:
        """The sections by name, as views of the array or of its twin on the device."""
        return dict(zip(self._sizes, line.split(list(self._sizes.values())), strict=True))


# Newcomers of one step; more of them go without a graph.
MOST_CHUNKS = 16
# Llama-8B on an H200 (2026-11-15): up to some 128 tokens a step takes as long as reading the weights does; beyond that
# padding costs what it computes, 24 µs a token. From 1,000 tokens on launching no longer takes longest, and a step that
# is not padded is the quicker one: 23.6 against 26.4 ms.
PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
# Without adapters launching takes less, so that padding costs more than it saves sooner: from 500 prompt tokens on
# (15.6 against 15.3 ms; with six adapters 17.0 against 20.3).
MOST_OF_BASE = 512
# Of light models: computed in eight bits, 2,048 tokens of Llama-8B take some 30 ms, and launching them with adapters 49
# (2026-11-17). So all their steps are in graphs, the largest in frames without much padding.
PROMPT_TOKENS_IF_LIGHT = (*PROMPT_TOKENS, 1536)
# Of steps with prompts. Below 32 a row costs next to nothing, and above it padding costs what it computes.
DECODE_STEP = 32


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """How many tokens a step with prompts has at most, its decodes among them, and what limits such a step."""

    budget: int
    is_light: bool = False  # a layer is computed sooner than it is launched


@dataclass(frozen=True, slots=True)
class StepFrame:
    """Room for a step of so many decodes and chunks; `Rows.accept` fills it."""

    decodes: int
    prompt_tokens: int = 0
    chunks: int = 0
    sampled: int = 0  # chunks that may sample
    page_changes: int = 0  # of a step that brings more, they are sent ahead

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    def holds(self, plan: StepPlan) -> bool:
        """Whether a step has room in the frame."""
        if len(plan.decodes) > self.decodes or len(plan.chunks) > self.chunks:
            return False
        if not self.chunks:
            # A decode grows by a token, so it is granted one block at most. Seats may bring more: they are sent ahead.
            return len(plan.grants) <= self.page_changes
        return sum(chunk.length for chunk in plan.chunks) <= self.prompt_tokens


def frame_of(plan: StepPlan) -> StepFrame:
    """The frame that a step fills without padding."""
    prompt_tokens = sum(chunk.length for chunk in plan.chunks)
    sampled = sum(chunk.samples for chunk in plan.chunks)
    return StepFrame(len(plan.decodes), prompt_tokens, len(plan.chunks), sampled)


def decode_frames(rows: int) -> list[StepFrame]:
    """Batch sizes worth a graph of their own, up to and including `rows`; a step is padded to the next one."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, rows + 1, 16)]
    return [StepFrame(size, page_changes=size) for size in (*(size for size in sizes if size < rows), rows)]


def mixed_frames(rows: int, prompts: PromptRoom, has_adapters: bool = True) -> list[StepFrame]:
    """Frames worth a graph, the smallest first: for steps with prompts on so many rows."""
    sizes: tuple[int, ...] = PROMPT_TOKENS
    most = PROMPT_TOKENS[-1] if has_adapters else MOST_OF_BASE
    if prompts.is_light:
        sizes, most = PROMPT_TOKENS_IF_LIGHT, PROMPT_TOKENS_IF_LIGHT[-1]
    most = min(prompts.budget, most)
    decodes = [count for count in (DECODE_STEP // 2, *range(DECODE_STEP, rows, DECODE_STEP), rows) if count <= rows]
    frames = {mixed_frame(count, size) for size in (*sizes, most) if size <= most for count in decodes}
    if prompts.is_light:
        # While prompts wait, all steps use up their budget: the more decodes, the less of the prompts.
        full = range(DECODE_STEP, min(rows + DECODE_STEP, prompts.budget), DECODE_STEP)
        frames |= {mixed_frame(min(count, rows), prompts.budget - count) for count in full}
        frames |= {mixed_frame(decodes[0], prompts.budget)}  # without decodes
    return sorted(frames, key=lambda frame: (frame.tokens, frame.decodes))


def mixed_frame(decodes: int, prompt_tokens: int) -> StepFrame:
    """Room for decodes beside chunks."""
    return StepFrame(decodes, prompt_tokens, MOST_CHUNKS, MOST_CHUNKS)


@functools.lru_cache(maxsize=1024)
def layout_of(frame: StepFrame) -> FrameLayout:
    """How a step's inputs lie in one array."""
    decodes, prompt, chunks, sampled = frame.decodes, frame.prompt_tokens, frame.chunks, frame.sampled
    return FrameLayout(
        {
            "rows": decodes,
            "lengths": decodes,
            "places": frame.page_changes,
            "blocks": frame.page_changes,
            "token_ids": prompt,
            "positions": prompt,
            "token_rows": prompt,
            "last": sampled,
            "sampled_rows": sampled,
            "sampled_lengths": sampled,
            "chunk_rows": chunks,
            "starts": chunks,
            "offsets": chunks + 1 if chunks else 0,
        }
    )
