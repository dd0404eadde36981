"""The engine carries out plans: it holds the tensors, computes a step's tokens and never waits for them itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.config import Capacity
from rota.core.ids import BASE, BlockId, RequestId, Row
from rota.core.messages import Message
from rota.core.plan import Chunk, Seat, StepPlan, StepResult
from rota.core.request import SamplingParams
from rota.engine.draw import argmax, unless_lost
from rota.engine.frames import MOST_CHUNKS, DecodeFrame, Frame, mixed_frames
from rota.engine.graphs import StepGraphs, capture_graphs, decode_frames
from rota.engine.inputs import Inputs, Rows
from rota.engine.kv_cache import KVCache
from rota.engine.lora.adapters import Adapters
from rota.engine.model.spec import ModelSpec
from rota.engine.processor import quickest
from rota.engine.sampler import Sampled, Sampler
from rota.engine.scores import score, tokens_at_once
from rota.engine.step import DeviceStep
from rota.engine.threads import Threads
from rota.engine.ticket import Ticket, send_home

Numbers = NDArray[np.int32]

NOBODY: Numbers = np.empty(0, np.int32)
NO_TOKENS = Sampled(torch.empty(0, dtype=torch.int64))
# Steps that are timed for each number of threads.
TRIES = 1


class Model(Protocol):
    """What the engine asks of a model."""

    def learn(self, rows: Sequence[int]) -> None:
        """Find out how steps of so many tokens are computed quickest, before they are captured."""
        ...

    def forward(self, step: DeviceStep, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[tokens, hidden size]; writes the tokens' keys and values into the cache."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, hidden size] -> [n, vocabulary] in the model's precision, written to `out` if there is one."""
        ...


class Engine:
    """Plans in, tokens out. On a GPU `submit` only queues work, and `collect` waits for that step alone.

    Steps run in the order they were submitted, so a row may change hands while an older step that used it is still
    under way: the device sees the old tenant's work before the new one's.
    """

    def __init__(
        self, model: Model, spec: ModelSpec, cache: KVCache, capacity: Capacity, adapters: Adapters | None = None
    ) -> None:
        self.spec = spec
        self._adapters = adapters
        self.capacity = capacity
        self._device = cache.device
        self._model = model
        self._cache = cache
        pages = -(-capacity.max_sequence_tokens // capacity.block_size)
        self._rows = Rows(capacity.rows, pages, capacity.block_size, cache.scratch_block, self._device)
        self._sampler = Sampler(capacity.rows, spec.vocab_size, self._device)
        self._scored_at_once = tokens_at_once(spec.vocab_size)
        self._graphs: StepGraphs | None = None
        self._threads: Threads | None = None

    @torch.inference_mode()
    def capture(self, most_prompt_tokens: int, quiet: bool = False) -> None:
        """Replay steps as CUDA graphs from now on; the attention must not read lengths on the host."""
        frames, has_bank = self._frames(most_prompt_tokens), self._adapters is not None
        self._model.learn(sorted({frame.tokens for frame in frames}))
        most = max(frame.decodes for frame in frames) + MOST_CHUNKS
        logits = torch.empty(most, self.spec.vocab_size, dtype=self._cache.dtype, device=self._device)
        self._graphs = capture_graphs(self.compute_framed, self._padding, frames, logits, quiet, has_bank)

    def rehearse(self, most_prompt_tokens: int) -> None:
        """Compute a step in every frame, and the first ones of a request: whatever has to be compiled is compiled."""
        for frame in self._frames(most_prompt_tokens):
            for has_adapters in (True, False) if self._adapters is not None else (False,):
                inputs = torch.from_numpy(self._padding(frame, has_adapters)).to(self._device)
                self.compute_framed(inputs, frame, has_adapters)
        self.warm_up()

    def _frames(self, most_prompt_tokens: int) -> list[Frame]:
        rows = self.capacity.rows
        return [*decode_frames(rows), *mixed_frames(rows, most_prompt_tokens)]

    def share_threads(self, threads: Threads) -> None:
        """Compute with so many threads from now on: a CPU's."""
        self._threads = threads

    def seconds_of_step(self, tokens: int, threads: int) -> float:
        """How long a decode step of so many tokens takes on a CPU with so many threads."""
        torch.set_num_threads(threads)
        frame = DecodeFrame(tokens)
        inputs = torch.from_numpy(self._padding(frame, has_adapters=False))
        return quickest(lambda: self.compute_framed(inputs, frame, has_adapters=False), TRIES)

    def listen(self, post: Callable[[Message], None]) -> None:
        """Tell of adapters through `post`, from the loader's threads."""
        if self._adapters is not None:
            self._adapters.listen(post)

    def close(self) -> None:
        """End the threads that bring adapters."""
        if self._adapters is not None:
            self._adapters.close()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step; on a CPU this is where it is computed."""
        if self._threads is not None:
            self._threads.use(plan.tokens)
        if self._adapters is not None:
            self._adapters.accept(plan)
        if plan.seats:
            self._sampler.seat(plan.seats)
        if self._graphs is not None and (plan.decodes or plan.chunks) and (frame := self._graphs.frame_for(plan)):
            return send_home(self._replay(self._graphs, plan, frame), self._device)
        inputs = self._rows.accept(plan)
        if not plan.chunks and not plan.decodes:
            return send_home(NO_TOKENS, self._device)
        return send_home(self._compute(plan, inputs), self._device)

    def warm_up(self) -> None:
        """Run a prompt and a sampled decode once, so that no request pays for compiling and first allocations."""
        block_size, longest = self.capacity.block_size, self.capacity.max_sequence_tokens
        prompt = (0,) * min(block_size, longest - 1)
        blocks = tuple(BlockId(block) for block in range(len(prompt) // block_size + 1))
        seat = Seat(RequestId("warm-up"), Row(0), BASE, prompt, len(prompt), blocks, SamplingParams(top_p=0.9))
        prefill = StepPlan(0, seats=(seat,), chunks=(Chunk(Row(0), 0, len(prompt), samples=True),))
        for plan in (prefill, StepPlan(1, decodes=(Row(0),))):
            self.collect(self.submit(plan))

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step and give its tokens, decodes first, then chunks that sample."""
        return ticket.wait()

    def _replay(self, graphs: StepGraphs, plan: StepPlan, frame: Frame) -> Sampled:
        inputs, has_adapters = self.framed_inputs(plan, frame)
        graph = graphs.replay(inputs, frame, has_adapters)
        host_rows = np.array(plan.sampled_rows, np.int64)
        # Among the rows that a frame has room to sample for, these do: decodes from the first on, chunks behind all.
        decodes, chunks = len(plan.decodes), len(host_rows) - len(plan.decodes)
        if not self._sampler.needs(host_rows):
            return Sampled(_picked(graph.tokens, decodes, frame, chunks))
        framed = (graph.logits, *self._framed_rows(graph.inputs, frame))
        logits, rows, lengths = (_picked(each, decodes, frame, chunks) for each in framed)
        return self._sample(logits, rows, lengths, host_rows)

    def framed_inputs(self, plan: StepPlan, frame: Frame) -> tuple[Numbers, bool]:
        """What a step in this frame reads, in one line: the frame's inputs, and its tokens' slots if some have one."""
        if isinstance(frame, DecodeFrame):
            lines = self._rows.accept_decodes(plan, frame.decodes)
            line, token_rows = lines.ravel(), lines[0]
        else:
            line = self._rows.accept_mixed(plan, frame)
            token_rows = frame.token_rows(line)
        slots = self._slots_of(token_rows)
        return (line, False) if slots is None else (self._with_slots(line, slots), True)

    def _with_slots(self, line: Numbers, slots: Numbers) -> Numbers:
        assert self._adapters is not None
        frame = self._adapters.frame(len(slots))
        inputs = np.empty(line.size + frame.numbers, np.int32)
        inputs[: line.size] = line
        frame.write(slots, inputs[line.size :])
        return inputs

    def _padding(self, frame: Frame, has_adapters: bool) -> Numbers:
        line, _ = self.framed_inputs(StepPlan(0), frame)
        if not has_adapters:
            return line
        assert self._adapters is not None
        return self._with_slots(line, self._adapters.no_slots(frame.tokens))

    def _compute(self, plan: StepPlan, inputs: Inputs) -> Sampled:
        rows, lengths = inputs.rows[: inputs.decodes], inputs.lengths[: inputs.decodes]
        slots = self._slots_of(inputs.host_token_rows)
        lora = self._adapters.batch(slots) if self._adapters is not None and slots is not None else None
        step = self._rows.device_step(rows, lengths, inputs.longest_decode, inputs.chunks, lora)
        hidden = self._model.forward(step, self._cache.layers)
        sampled = self._sample_last(inputs, hidden) if len(inputs.host_rows) else NO_TOKENS
        if not plan.scorings:
            return sampled
        return replace(sampled, scores=score(plan, self._rows, hidden, self._model.logits, self._scored_at_once))

    def _sample_last(self, inputs: Inputs, hidden: Tensor) -> Sampled:
        if inputs.chunks is not None:
            hidden = torch.cat([hidden[: inputs.decodes], hidden[inputs.chunks.last]])
        return self._sample(self._model.logits(hidden), inputs.rows, inputs.lengths, inputs.host_rows)

    def _sample(self, logits: Tensor, rows: Tensor, lengths: Tensor, host_rows: NDArray[np.integer]) -> Sampled:
        logits = logits.float()
        sampled = self._sampler.sample(logits, rows, lengths, host_rows)
        self._rows.newest_token[rows] = sampled.tokens
        return replace(sampled, tokens=unless_lost(sampled.tokens, logits))

    def _slots_of(self, rows: NDArray[np.integer]) -> Numbers | None:
        return self._adapters.slots_of(rows) if self._adapters is not None else None

    @torch.inference_mode()
    def compute_framed(
        self, inputs: Tensor, frame: Frame, has_adapters: bool, logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A whole greedy step that is right for whoever is in it, however long they are: the body of a graph.

        Gives tokens and logits of every row that the frame has room to sample for; these are written to the beginning
        of `logits` if it is there.
        """
        lora = None
        if self._adapters is not None and has_adapters:
            lora = self._adapters.frame(frame.tokens).view(inputs[frame.numbers :])
        longest = self.capacity.max_sequence_tokens
        rows, _ = self._framed_rows(inputs, frame)
        if isinstance(frame, DecodeFrame):
            decode_rows, lengths, places, blocks = inputs[: frame.numbers].view(4, -1)
            self._rows.write_pages(places, blocks)
            step = self._rows.device_step(decode_rows, lengths, longest, lora=lora)
            hidden = self._model.forward(step, self._cache.layers)
        else:
            framed = frame.view(inputs)
            step = self._rows.device_step(framed.rows, framed.lengths, longest, framed.chunks, lora)
            hidden = self._model.forward(step, self._cache.layers)
            hidden = torch.cat([hidden[: frame.decodes], hidden[framed.chunks.last]])
        logits = self._model.logits(hidden, None if logits is None else logits[: len(hidden)])
        tokens = argmax(logits)
        self._rows.newest_token[rows] = tokens
        return unless_lost(tokens, logits), logits

    def _framed_rows(self, inputs: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """The rows that a frame samples for, and how many tokens each knows; padding's among them."""
        if isinstance(frame, DecodeFrame):
            return inputs[: frame.decodes], inputs[frame.decodes : 2 * frame.decodes]
        framed = frame.view(inputs)
        return torch.cat([framed.rows, framed.sampled_rows]), torch.cat([framed.lengths, framed.sampled_lengths])


def _picked(framed: Tensor, decodes: int, frame: Frame, chunks: int) -> Tensor:
    """Of what a frame gave, the share of those who are in the step."""
    if not chunks:
        return framed[:decodes]
    return torch.cat([framed[:decodes], framed[frame.decodes : frame.decodes + chunks]])
