"""A sequence run through our model by hand: chunks and decodes over a cache whose blocks lie in no order."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rota.engine.attention.torch_attention import TorchAttention
from rota.engine.families.decoder import Kernels
from rota.engine.families.table import make_model, read_spec
from rota.engine.layer_cache import LayerCache
from rota.engine.ops.cpu import CPUOperations
from rota.engine.ops.reference import Operations
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.step.device_step import DeviceStep, PrefillPart, int32
from rota.engine.weights.load import load_weights

BLOCK_SIZE = 8
PAGES = 32
CPU = torch.device("cpu")
FAMILIES_OF_OPERATIONS: dict[str, Operations] = {"reference": Operations(), "cpu": CPUOperations()}


class Sequences:
    """Rows that sit before one model; tokens are given by hand, logits come back."""

    def __init__(
        self,
        folder: Path,
        rows: int = 1,
        operations: str = "cpu",
        dtype: torch.dtype = torch.float32,
        maker: MatrixMaker | None = None,
    ) -> None:
        spec = read_spec(folder)
        weights = load_weights(folder, spec, CPU, dtype, quiet=True, maker=maker)
        attention = TorchAttention(spec.attention_scale)
        self.model = make_model(spec, weights, Kernels(FAMILIES_OF_OPERATIONS[operations], attention))
        size = (rows * PAGES, spec.kv_heads, BLOCK_SIZE, spec.head_dim)
        self.cache = [
            LayerCache(keys=torch.zeros(size, dtype=dtype), values=torch.zeros(size, dtype=dtype))
            for _ in range(spec.layers)
        ]
        order = torch.randperm(rows * PAGES, generator=torch.Generator().manual_seed(1))
        # One more row for padding, which nobody uses here.
        self.tables = torch.cat((order.view(rows, PAGES), torch.zeros(1, PAGES, dtype=torch.int64))).int()
        self.lengths = [0] * rows

    def step(self, decodes: dict[int, int] | None = None, chunks: dict[int, list[int]] | None = None) -> Tensor:
        """Logits of every token of the step: one token for each decoding row, then the chunks' tokens."""
        decodes, chunks = decodes or {}, chunks or {}
        rows = list(decodes) + [row for row, tokens in chunks.items() for _ in tokens]
        positions = [self.lengths[row] for row in decodes]
        for row, tokens in chunks.items():
            positions += range(self.lengths[row], self.lengths[row] + len(tokens))
        tokens = list(decodes.values()) + [token for chunk in chunks.values() for token in chunk]
        slots = [
            int(self.tables[row, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
            for row, at in zip(rows, positions, strict=True)
        ]
        lengths = [self.lengths[row] + 1 for row in decodes]
        step = DeviceStep(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            addresses=torch.tensor(slots),
            tables=self.tables,
            decode_rows=int32(list(decodes)),
            decode_lengths=int32(lengths),
            prefill=self._prefill(chunks) if chunks else None,
        )
        for row in rows:
            self.lengths[row] += 1
        return self.model.logits(self.model.forward(step, self.cache))

    def _prefill(self, chunks: dict[int, list[int]]) -> PrefillPart:
        rows, starts = tuple(chunks), tuple(self.lengths[row] for row in chunks)
        lengths = tuple(len(tokens) for tokens in chunks.values())
        offsets = [sum(lengths[:chunk]) for chunk in range(len(lengths) + 1)]
        return PrefillPart(int32(rows), int32(starts), int32(offsets), max(lengths), rows, starts, lengths)
