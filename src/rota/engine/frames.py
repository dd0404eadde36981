"""A frame gives a step's inputs a fixed size, so that a captured graph finds them in one place, whoever is in the step.

    decodes only   rows  lengths  places  blocks        each as long as the frame has decodes

    mixed          rows  lengths | token_ids  positions  token_rows | last  sampled_rows  sampled_lengths  chunk_rows …
                   decodes, each |       prompt tokens, each        | MOST_CHUNKS, each

What a step does not fill is padding: the padding row's, which reads and writes only the scratch block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rota.core.plan import StepPlan
from rota.engine.step import ChunkInputs, PrefillPart

Numbers = NDArray[np.int32]

# Newcomers of one step; more of them go without a graph.
MOST_CHUNKS = 16
# Llama-8B on an H200 (2026-11-15): up to some 128 tokens a step takes as long as reading the weights does; beyond that
# padding costs what it computes, 24 µs a token. From 1,000 tokens on launching no longer takes longest, and a step that
# is not padded is the quicker one: 23.6 against 26.4 ms.
PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
DECODES = (16, 64, 128)


@dataclass(frozen=True, slots=True)
class DecodeFrame:
    """Room for a step that only decodes; `Rows.accept_decodes` writes its inputs."""

    decodes: int

    @property
    def tokens(self) -> int:
        return self.decodes

    @property
    def numbers(self) -> int:
        return 4 * self.decodes

    def holds(self, plan: StepPlan) -> bool:
        """Every decode grows by a token, so it is granted one block at most."""
        return not plan.seats and len(plan.grants) <= len(plan.decodes) <= self.decodes


@dataclass(frozen=True, slots=True)
class MixedFrame:
    """Room for a step of decodes and chunks; `Rows.accept_mixed` writes its inputs."""

    decodes: int
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    @property
    def numbers(self) -> int:
        """How many int32 its inputs are."""
        return sum(self._sections())

    def holds(self, plan: StepPlan) -> bool:
        prompt_tokens = sum(chunk.length for chunk in plan.chunks)
        is_small = len(plan.decodes) <= self.decodes and len(plan.chunks) <= MOST_CHUNKS
        return is_small and prompt_tokens <= self.prompt_tokens

    def _sections(self) -> tuple[int, ...]:
        return (*(self.decodes,) * 2, *(self.prompt_tokens,) * 3, *(MOST_CHUNKS,) * 5, MOST_CHUNKS + 1)

    def write(self, sections: tuple[Numbers, ...], padding_row: int) -> Numbers:
        """Lay the sections of a step, in the order above, into a padded line."""
        line = np.empty(self.numbers, np.int32)
        fillings = (padding_row, 1, 0, 0, padding_row, 0, padding_row, 1, padding_row, 0, sections[-1][-1])
        end = 0
        for size, section, filling in zip(self._sections(), sections, fillings, strict=True):
            line[end : end + len(section)] = section
            line[end + len(section) : end + size] = filling
            end += size
        return line

    def token_rows(self, line: Numbers) -> Numbers:
        """[tokens] whose each token is, padding's row where nobody's."""
        begin = 2 * self.decodes + 2 * self.prompt_tokens
        return np.concatenate([line[: self.decodes], line[begin : begin + self.prompt_tokens]])

    def view(self, line: Tensor) -> FramedInputs:
        """The inputs that lie in a line's device twin; they share its memory."""
        rows, lengths, *chunks, chunk_rows, starts, offsets = line[: self.numbers].split(self._sections())
        token_ids, positions, token_rows, last, sampled_rows, sampled_lengths = chunks
        # No host twins: a graph must not ask what is in a step.
        part = PrefillPart(chunk_rows, starts, offsets, self.prompt_tokens, (), (), ())
        inputs = ChunkInputs(token_ids, positions, token_rows, last, part)
        return FramedInputs(rows, lengths, inputs, sampled_rows, sampled_lengths)


Frame = DecodeFrame | MixedFrame


@dataclass(frozen=True, slots=True)
class FramedInputs:
    """A padded step on the device: decodes, chunks, and the chunks' rows that sample with the tokens they know."""

    rows: Tensor
    lengths: Tensor
    chunks: ChunkInputs
    sampled_rows: Tensor
    sampled_lengths: Tensor


def mixed_frames(rows: int, budget: int) -> list[MixedFrame]:
    """Frames worth a graph, the smallest first: for steps of up to `budget` tokens on so many rows."""
    return sorted(_mixed_frames(rows, budget), key=lambda frame: (frame.tokens, frame.decodes))


def _mixed_frames(rows: int, budget: int) -> Iterator[MixedFrame]:
    most = min(budget, PROMPT_TOKENS[-1])
    for prompt_tokens in (*(size for size in PROMPT_TOKENS if size < most), most):
        for decodes in (*(count for count in DECODES if count < rows), rows):
            yield MixedFrame(decodes, prompt_tokens)
