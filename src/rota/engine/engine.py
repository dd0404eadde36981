"""The engine carries out plans: it holds the tensors, computes a step's tokens and never waits for them itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.grammar import Grammar, Grammars
from rota.core.ids import BASE, BlockId, RequestId, Row
from rota.core.messages import Message, SlotsGrew
from rota.core.plan import Chunk, Seat, StepPlan, StepResult
from rota.core.request import SamplingParams
from rota.core.stages import Stage
from rota.engine.autotune import StageRecorder
from rota.engine.computation import Computation
from rota.engine.cpu import Threads
from rota.engine.drawing import Drawing, DrawnStep, Ticket
from rota.engine.families.decoder import Decoder
from rota.engine.kv_cache import KVCache
from rota.engine.lora.adapters import Adapters
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.group import ONE_RANK, RankGroup
from rota.engine.parallel.shard import WHOLE, Shard
from rota.engine.progress import tracked
from rota.engine.sampling.sampler import Sampler
from rota.engine.sampling.vocabulary import RankVocabulary
from rota.engine.step.frames import MOST_CHUNKS, PromptRoom, StepFrame, decode_frames, mixed_frames
from rota.engine.step.graphs import Kind
from rota.engine.step.inputs import Rows
from rota.start import START

# A decode on a GPU is timed this many times, and the shortest counts: it takes milliseconds, and one may be delayed.
FEW_DECODES = 3


class Engine:
    """Plans in, tokens out. On a GPU `submit` only queues work, and `collect` waits for that step alone.

    Steps run in the order in which they are submitted. So a row may get a new sequence while an older step still uses
    the row: the device computes the old sequence's step first.
    """

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        cache: KVCache,
        capacity: Capacity,
        adapters: Adapters,
        group: RankGroup = ONE_RANK,
        shard: Shard = WHOLE,
    ) -> None:
        self.spec = spec
        self.capacity = capacity
        self._model = model
        self._cache = cache
        self._adapters = adapters
        self._device = cache.device
        pages = -(-capacity.max_sequence_tokens // capacity.block_size)
        self._rows = Rows(capacity.rows, pages, capacity.block_size, cache.scratch_block, self._device)
        self._group = group
        self._vocabulary = RankVocabulary(spec.vocab_size, group, shard)
        self._computation = Computation(model, self._rows, cache, adapters, self._vocabulary)
        self._sampler = sampler = Sampler(capacity.rows, spec.vocab_size, self._device, draws=group.rank == 0)
        self._drawing = Drawing(model, self._rows, self._vocabulary, sampler, group, adapters.batch_of)
        self._threads: Threads | None = None
        self._post: Callable[[Message], None] = lambda _: None
        self._ended_at = 0.0  # of the step before
        self.stages: tuple[Stage, ...] = ()  # of its building
        self.closing = ExitStack()  # what else ends with the engine

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step; on a CPU the step is computed here."""
        began_at = time.monotonic()
        ticket = self._begin(plan)
        ticket.began_at, ticket.host_s = began_at, time.monotonic() - began_at
        return ticket

    def _begin(self, plan: StepPlan) -> Ticket:
        if self._threads is not None:
            self._threads.use(plan.tokens)
        if self._adapters.grow():
            self._computation.forget_graphs_with_adapters()
            self._post(SlotsGrew(self._adapters.bank.size_bytes, time.monotonic()))
        self._adapters.accept(plan)
        self._adapters.launch(plan)
        if plan.seats:
            self._drawing.seat(plan.seats)
        ran = self._computation.run(plan)
        if ran is None:
            return self._drawing.begin(None)
        return self._drawing.begin(DrawnStep(plan, *ran, self._adapters.lost(plan.sampled_rows)))

    @torch.inference_mode()
    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step and return its tokens: those of decodes first, then of chunks that sample.

        A step that follows a grammar is drawn when the step before it is collected, and before the next is submitted.
        """
        result = self._drawing.end(ticket)
        self._adapters.note_landing()
        # A GPU begins a step when the step before it is done.
        is_cpu, began_at = self._device.type == "cpu", max(ticket.began_at, self._ended_at)
        self._ended_at = result.at
        return replace(result, step_s=ticket.host_s if is_cpu else result.at - began_at)

    # ── before the first step ────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def capture(self, prompts: PromptRoom, quiet: bool = False, stage: StageRecorder | None = None) -> None:
        """Replay steps as CUDA graphs from now on; the attention must not read lengths on the host.

        Those of decodes are captured here, and all of them if there are other ranks: those capture at the same time.
        """
        stage = stage or StageRecorder()
        kinds = self._kinds(prompts)
        with stage("tuning"):
            self._model.tune(sorted({frame.tokens for frame, _ in kinds}))
        with stage("graphs"):
            most = max(frame.decodes for frame, _ in kinds) + MOST_CHUNKS
            logits = torch.empty(most, self._vocabulary.own, dtype=self._model.dtype, device=self._device)
            graphs = self._computation.use_graphs(kinds, logits)
            first = [kind for kind in kinds if not kind[0].chunks or self._group.size > 1]
            for kind in tracked(first, "Capturing CUDA graphs", is_quiet=quiet):
                graphs.capture(kind)

    @torch.inference_mode()
    def work_while_idle(self) -> bool:
        """Do a little of what can wait; False if nothing is left to do."""
        graphs = self._computation.graphs
        return graphs is not None and graphs.capture_next()

    @torch.inference_mode()
    def precompile(self, prompts: PromptRoom) -> None:
        """Compile every kernel: compute a step in every frame, and the first steps of a request."""
        for frame, has_adapters in self._kinds(prompts):
            inputs = torch.from_numpy(self._computation.padding(frame, has_adapters)).to(self._device)
            self._computation.compute(inputs, frame, has_adapters)
            START.tell_progress("Compiling kernels")
        self.warm_up()

    def warm_up(self) -> None:
        """Run a prompt and a sampled decode once, so that no request waits for compiling and first allocations.

        They are timed: scheduler and supervisor must know how long a step takes before they have seen one.
        """
        START.tell_progress("Warming up")
        block_size, longest = self.capacity.block_size, self.capacity.max_sequence_tokens
        is_cpu = self._device.type == "cpu"
        decodes = 1 if is_cpu else min(FEW_DECODES, longest - 1)
        prompt = (0,) * min(block_size, longest - decodes)
        blocks = tuple(BlockId(block) for block in range(-(-(len(prompt) + decodes) // block_size)))
        seat = Seat(
            request_id=RequestId("warm-up"),
            row=Row(0),
            adapter_id=BASE,
            tokens=prompt,
            prompt_length=len(prompt),
            blocks=blocks,
            sampling=SamplingParams(top_p=0.9, seed=0),
        )
        prefill = StepPlan(
            step_id=0, seats=(seat,), chunks=(Chunk(row=Row(0), start=0, length=len(prompt), samples=True),)
        )
        prompt_s = self._seconds(prefill)
        decode_s = min(self._seconds(StepPlan(step_id=1, decodes=(Row(0),))) for _ in range(decodes))
        token_s = prompt_s / len(prompt) if is_cpu else 0.0  # a GPU computes many tokens as fast as these few
        self.capacity = replace(self.capacity, decode_s=decode_s, token_s=token_s)
        self._sampler.warm_up(self._model.dtype)

    def _seconds(self, plan: StepPlan) -> float:
        return self.collect(self.submit(plan)).step_s or 0.0

    def use_grammars(self, grammars: Grammars) -> None:
        """Follow the grammars of requests with these from now on."""
        self._drawing.guides.use(grammars)

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        """True: `then` is called once requests may follow a grammar without waiting, from any thread."""
        return self._drawing.guides.prepare(grammar, then)

    def use_threads(self, threads: Threads) -> None:
        """Compute with these numbers of CPU threads from now on."""
        self._threads = threads

    @torch.inference_mode()
    def seconds_of_step(self, tokens: int, threads: int) -> float:
        """How long a decode step of `tokens` tokens takes on a CPU with `threads` threads."""
        START.tell_progress("Timing steps")
        torch.set_num_threads(threads)
        frame = StepFrame(tokens)
        inputs = torch.from_numpy(self._computation.padding(frame, has_adapters=False))
        started_at = time.perf_counter()
        self._computation.compute(inputs, frame, has_adapters=False)
        return time.perf_counter() - started_at

    def _kinds(self, prompts: PromptRoom) -> list[Kind]:
        """Of the steps that are worth a graph, the largest first: the smaller ones then fit into the pool's memory."""
        rows = self.capacity.rows
        kinds = [
            (frame, has_adapters)
            for has_adapters in (True, False)
            for frame in (*decode_frames(rows), *mixed_frames(rows, prompts, has_adapters))
        ]
        return sorted(kinds, key=lambda kind: kind[0].tokens, reverse=True)

    # ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────

    def listen(self, post: Callable[[Message], None]) -> None:
        """Send messages about adapters through `post`, from the loader's threads and from that of the steps."""
        self._post = post
        self._adapters.listen(post)

    def check(self, adapter: Adapter) -> str:
        """Why an adapter cannot be served, as far as its config and headers tell; empty if it can. Blocks."""
        return self._adapters.check(adapter)

    def dismiss(self) -> None:
        """No other rank is told by this one."""

    def close(self) -> None:
        """End the threads that load adapters and prepare grammars, and leave the group."""
        self._adapters.close()
        self._drawing.guides.close()
        self._group.close()
        self.closing.close()
