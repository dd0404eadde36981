"""Penalties count the prompt and output tokens of a row, and make them less likely."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rota.core.plan import Seat
from rota.engine.device import send


class Penalties:
    """Counts of every row's tokens, on the device; they take no memory until a request has a penalty.

    A row without penalties multiplies by one and subtracts zero, whatever its counts. So counts are kept and cleared
    only for rows with penalties.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._size = (rows, vocabulary)
        self._device = device
        self._in_prompt: Tensor | None = None  # [rows, vocabulary] bool
        self._written: Tensor | None = None  # [rows, vocabulary] int32

    def seat(self, seat: Seat) -> None:
        """Count the prompt and the output so far; a preempted sequence already has output."""
        in_prompt, written = self._tables()
        tokens = send(np.array(seat.tokens, dtype=np.int64), self._device)
        prompt, output = tokens[: seat.prompt_length], tokens[seat.prompt_length :]
        in_prompt[seat.row].zero_().index_fill_(0, prompt, True)
        written[seat.row].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: Tensor, rows: Tensor, factors: Tensor) -> Tensor:
        """New logits: repetition as Hugging Face defines it, then presence and frequency as OpenAI defines them.

        `factors` [n, 3] are the three in this order.
        """
        in_prompt, written = self._tables()
        repetition, presence, frequency = factors[:, :, None].unbind(1)
        counts = written[rows]
        was_written = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(in_prompt[rows] | was_written, repeated, logits)
        return logits - counts * frequency - was_written * presence

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Remember the tokens just chosen; rows are all different."""
        _, written = self._tables()
        places = rows.to(torch.int64) * self._size[1] + tokens
        written.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._in_prompt is None or self._written is None:
            self._in_prompt = torch.zeros(self._size, dtype=torch.bool, device=self._device)
            self._written = torch.zeros(self._size, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._written
