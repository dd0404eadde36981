"""A computation is a whole step on the device: from one array of numbers to tokens, the same in a graph and outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rota.core.plan import Chunk, StepPlan
from rota.engine.device import send
from rota.engine.kv_cache import KVCache
from rota.engine.lora.adapters import Adapters
from rota.engine.model.protocol import Model
from rota.engine.sampling.vocabulary import RankVocabulary
from rota.engine.step.device_step import Groups, LoraBatch
from rota.engine.step.frames import Numbers, StepFrame, StepInputs, frame_of
from rota.engine.step.graphs import GraphCapture, Kind, StepGraphs
from rota.engine.step.inputs import PackedStep, Rows
from rota.engine.step.results import Computed


@dataclass(frozen=True, slots=True)
class HostInputs:
    """A step's inputs on the host, and facts about them that only the host knows."""

    numbers: Numbers  # the frame's, and behind them the adapters' if the step has any
    has_adapters: bool
    chunks: Sequence[Chunk] = ()
    groups: Groups = ()
    head_groups: Groups = ()  # of the rows that sample


class Computation:
    """The model over rows, cache and adapters: a graph's replay where a graph holds the step, kernel by kernel else."""

    def __init__(
        self, model: Model, rows: Rows, cache: KVCache, adapters: Adapters | None, vocabulary: RankVocabulary
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._rows = rows
        self._cache = cache
        self._adapters = adapters
        self.graphs: StepGraphs | None = None  # until `capture`

    def run(self, plan: StepPlan) -> tuple[StepFrame, Computed] | None:
        """Take down the plan's seats and grants, then compute its step in a frame; None if the plan has no tokens."""
        graph_frame = self.graphs.frame_for(plan, self._has_adapters(plan)) if self.graphs is not None else None
        packed = self._rows.accept(plan, graph_frame or frame_of(plan))
        if not plan.tokens:
            return None
        host = self._host_inputs(packed, plan)
        if self.graphs is not None and graph_frame is not None:
            return graph_frame, self.graphs.replay(host.numbers, graph_frame, host.has_adapters)
        inputs = send(host.numbers, self._cache.device)
        return packed.frame, self.compute(inputs, packed.frame, host.has_adapters, host=host)

    def compute(
        self,
        inputs: Tensor,
        frame: StepFrame,
        has_adapters: bool,
        logits: Tensor | None = None,
        host: HostInputs | None = None,
    ) -> Computed:
        """A greedy step, right for any rows and lengths. A graph captures this, without `host`.

        Logits are written to the beginning of `logits` if it is given.
        """
        step_inputs = frame.unpack(inputs[: frame.numbers], host.chunks if host else ())
        lora, head_lora = self._batches(inputs, frame, host) if has_adapters else (None, None)
        hidden = self._model.forward(self._rows.device_step(step_inputs, lora), self._cache.layers)
        sampling = _sampling(hidden, step_inputs)
        rows, lengths = _sampled_rows(step_inputs)
        logits = self._model.logits(sampling, None if logits is None else logits[: len(sampling)], head_lora)
        tokens, masked = self._vocabulary.greedy(logits)
        self._rows.newest_token[rows] = tokens
        return Computed(masked, logits, rows, lengths, hidden)

    def use_graphs(self, kinds: Sequence[Kind], logits: Tensor) -> StepGraphs:
        """Replay graphs of these kinds from now on, once they are captured; all of them write to `logits`."""
        self.graphs = StepGraphs(kinds, GraphCapture(self.compute, self.padding, logits))
        return self.graphs

    def forget_graphs_with_adapters(self) -> None:
        """They read memory that is not the adapters' any more; the device must be done with them."""
        if self.graphs is not None:
            self.graphs.forget(has_adapters=True)

    def padding(self, frame: StepFrame, has_adapters: bool) -> Numbers:
        """The inputs of a step in which every row is padding."""
        packed = self._rows.accept(StepPlan(step_id=0), frame)
        if not has_adapters:
            return packed.line
        assert self._adapters is not None
        base = self._adapters.bank.slots
        slots, sampled = (np.full(count, base, np.int32) for count in (frame.tokens, len(packed.sampled_rows)))
        return self._with_slots(packed, slots, sampled).numbers

    def _has_adapters(self, plan: StepPlan) -> bool:
        if self._adapters is None:
            return False
        rows = np.array([*plan.decodes, *(chunk.row for chunk in plan.chunks)], np.int64)
        return self._adapters.slots_of(rows) is not None

    def _host_inputs(self, packed: PackedStep, plan: StepPlan) -> HostInputs:
        """The inputs of a packed plan; with adapters only if one of its rows has one."""
        slots = self._adapters.slots_of(packed.token_rows) if self._adapters is not None else None
        if self._adapters is None or slots is None:
            return HostInputs(packed.line, False, plan.chunks)
        sampled = self._adapters.slots_of(packed.sampled_rows)
        if sampled is None:
            sampled = np.full(len(packed.sampled_rows), self._adapters.bank.slots, np.int32)
        return replace(self._with_slots(packed, slots, sampled), chunks=plan.chunks)

    def _with_slots(self, packed: PackedStep, slots: Numbers, sampled: Numbers) -> HostInputs:
        """The step's numbers, the slots of its tokens, and those of the rows that sample where these are others."""
        assert self._adapters is not None
        numbers, groups = self._adapters.frame(len(slots)).pack(slots)
        if not (self._adapters.has_head and packed.frame.chunks):
            return HostInputs(np.concatenate([packed.line, numbers]), True, groups=groups, head_groups=groups)
        head, head_groups = self._adapters.frame(len(sampled)).pack(sampled)
        line = np.concatenate([packed.line, numbers, head])
        return HostInputs(line, True, groups=groups, head_groups=head_groups)

    def _batches(self, inputs: Tensor, frame: StepFrame, host: HostInputs | None) -> tuple[LoraBatch, LoraBatch | None]:
        """Of the step's tokens, and for the head of the rows that sample; None if no adapter has factors there."""
        assert self._adapters is not None
        of_tokens, of_rows = (self._adapters.frame(count) for count in (frame.tokens, frame.decodes + frame.sampled))
        _, first, second = inputs.tensor_split([frame.numbers, frame.numbers + of_tokens.numbers])
        lora = of_tokens.unpack(first, host.groups if host else ())
        if not self._adapters.has_head:
            return lora, None
        return lora, of_rows.unpack(second, host.head_groups if host else ()) if frame.chunks else lora


def _sampling(hidden: Tensor, inputs: StepInputs) -> Tensor:
    """The hidden states that need logits: those of decodes, then of the last token of each chunk that samples."""
    if inputs.chunks is None:
        return hidden
    return torch.cat([hidden[: len(inputs.rows)], hidden[inputs.chunks.last]])


def _sampled_rows(inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """The rows that sample, and how many tokens each row knows."""
    if inputs.chunks is None:
        return inputs.rows, inputs.lengths
    return torch.cat([inputs.rows, inputs.sampled_rows]), torch.cat([inputs.lengths, inputs.sampled_lengths])
