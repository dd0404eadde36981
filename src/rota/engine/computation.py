"""A computation is a whole step on the device: from one array of numbers to tokens, the same in a graph and outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rota.core.plan import StepPlan
from rota.engine.device import send
from rota.engine.families.decoder import Decoder
from rota.engine.kv_cache import KVCache
from rota.engine.lora.adapters import Adapters
from rota.engine.sampling.vocabulary import RankVocabulary
from rota.engine.step.device_step import LoraBatch
from rota.engine.step.frames import Numbers, StepFrame, frame_of, layout_of
from rota.engine.step.graphs import GraphCapture, Kind, StepGraphs
from rota.engine.step.inputs import HostInputs, Rows
from rota.engine.step.results import Computed


class Computation:
    """The model over rows, cache and adapters: a graph's replay where a graph holds the step, kernel by kernel else."""

    def __init__(
        self, model: Decoder, rows: Rows, cache: KVCache, adapters: Adapters, vocabulary: RankVocabulary
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
        host = self._rows.accept(plan, graph_frame or frame_of(plan))
        if not plan.tokens:
            return None
        host = self._with_adapters(host)
        if self.graphs is not None and graph_frame is not None:
            return graph_frame, self.graphs.replay(host.numbers, graph_frame, host.has_adapters)
        inputs = send(host.numbers, self._cache.device)
        return host.frame, self.compute(inputs, host.frame, host.has_adapters, host=host)

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
        layout = layout_of(frame)
        sections = layout.unpack(inputs[: layout.numbers])
        lora, head_lora = self._batches(inputs, frame, host) if has_adapters else (None, None)
        step = self._rows.device_step(sections, host.chunks if host else (), lora)
        hidden = self._model.forward(step, self._cache.layers)
        sampling, rows, lengths = hidden, sections["rows"], sections["lengths"]
        if frame.chunks:  # of a chunk only its last token samples
            sampling = torch.cat([hidden[: frame.decodes], hidden[sections["last"]]])
            rows = torch.cat([rows, sections["sampled_rows"]])
            lengths = torch.cat([lengths, sections["sampled_lengths"]])
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
        host = self._rows.accept(StepPlan(step_id=0), frame)
        if not has_adapters:
            return host.numbers
        base = self._adapters.bank.slots
        slots, sampled = (np.full(count, base, np.int32) for count in (frame.tokens, len(host.sampled_rows)))
        return self._with_slots(host, slots, sampled).numbers

    def _has_adapters(self, plan: StepPlan) -> bool:
        rows = np.array([*plan.decodes, *(chunk.row for chunk in plan.chunks)], np.int64)
        return self._adapters.slots_of(rows) is not None

    def _with_adapters(self, host: HostInputs) -> HostInputs:
        """The same if none of its rows has an adapter; else with the slots of all rows."""
        slots = self._adapters.slots_of(host.token_rows)
        if slots is None:
            return host
        sampled = self._adapters.slots_of(host.sampled_rows)
        if sampled is None:
            sampled = np.full(len(host.sampled_rows), self._adapters.bank.slots, np.int32)
        return self._with_slots(host, slots, sampled)

    def _with_slots(self, host: HostInputs, slots: Numbers, sampled: Numbers) -> HostInputs:
        """The step's numbers, the slots of its tokens, and those of the rows that sample where these are others."""
        of_tokens, groups = self._adapters.frame(len(slots)).pack(slots)
        lines, head_groups = [host.numbers, of_tokens], groups
        if self._adapters.has_head and host.frame.chunks:
            of_rows, head_groups = self._adapters.frame(len(sampled)).pack(sampled)
            lines.append(of_rows)
        numbers = np.concatenate(lines)
        return replace(host, numbers=numbers, has_adapters=True, groups=groups, head_groups=head_groups)

    def _batches(self, inputs: Tensor, frame: StepFrame, host: HostInputs | None) -> tuple[LoraBatch, LoraBatch | None]:
        """Of the step's tokens, and for the head of the rows that sample; None if no adapter has factors there."""
        of_tokens, of_rows = (self._adapters.frame(count) for count in (frame.tokens, frame.decodes + frame.sampled))
        begin = layout_of(frame).numbers
        _, first, second = inputs.tensor_split([begin, begin + of_tokens.layout.numbers])
        lora = of_tokens.unpack(first, host.groups if host else ())
        if not self._adapters.has_head:
            return lora, None
        return lora, of_rows.unpack(second, host.head_groups if host else ()) if frame.chunks else lora
