"""The engine carries out plans: it holds the tensors, computes a step's tokens and never waits for them itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.config import LANDINGS, Capacity, EngineConfig, LoraConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.core.ids import BASE, BlockId, RequestId, Row
from rota.core.messages import Message
from rota.core.plan import Chunk, Seat, StepPlan, StepResult
from rota.core.request import SamplingParams
from rota.engine.attention.torch_attention import TorchAttention
from rota.engine.builtin import builtin_model_folder
from rota.engine.device import choose_backend, choose_device, choose_dtype, device_memory, set_threads
from rota.engine.draw import argmax
from rota.engine.graphs import DecodeGraphs, capture_graphs
from rota.engine.inputs import Inputs, Rows
from rota.engine.kv_cache import CacheShape, KVCache, count_blocks
from rota.engine.lora.adapters import Adapters, Project
from rota.engine.lora.bank import Bank, count_slots
from rota.engine.lora.loader import checkpoint_reader
from rota.engine.lora.reference import project_with_lora
from rota.engine.model.llama import Llama
from rota.engine.model.spec import ModelSpec, read_spec
from rota.engine.ops import reference
from rota.engine.ops.cpu import CPUOperations
from rota.engine.sampler import Sampled, Sampler
from rota.engine.step import Attention, DeviceStep, Operations
from rota.engine.ticket import Ticket, send_home
from rota.engine.weights import dummy_weights, load_weights

Numbers = NDArray[np.int32]

NOBODY: Numbers = np.empty(0, np.int32)
NO_TOKENS = Sampled(torch.empty(0, dtype=torch.int64))


class Model(Protocol):
    """What the engine asks of a model."""

    def forward(self, step: DeviceStep, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[tokens, hidden size]; writes the tokens' keys and values into the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden size] -> [n, vocabulary] float32"""
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
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self, quiet: bool = False) -> None:
        """Replay decode steps as CUDA graphs from now on; the attention must not read lengths on the host."""

        def padding(size: int, has_adapters: bool) -> Numbers:
            return self._graph_inputs(self._rows.accept_decodes(StepPlan(0), size), NOBODY if has_adapters else None)

        rows, vocabulary, has_bank = self.capacity.rows, self.spec.vocab_size, self._adapters is not None
        self._graphs = capture_graphs(self._decode_any_length, padding, rows, vocabulary, self._device, quiet, has_bank)

    def listen(self, post: Callable[[Message], None]) -> None:
        """Tell of adapters through `post`, from the loader's threads."""
        if self._adapters is not None:
            self._adapters.listen(post)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step; on a CPU this is where it is computed."""
        if self._adapters is not None:
            self._adapters.accept(plan)
        if plan.seats:
            self._sampler.seat(plan.seats)
        if self._graphs is not None and _only_decodes(plan):
            return send_home(self._replay(self._graphs, plan), self._device)
        inputs = self._rows.accept(plan)
        if not plan.chunks and not plan.decodes:
            return send_home(NO_TOKENS, self._device)
        return send_home(self._compute(inputs), self._device)

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

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> Sampled:
        decodes = len(plan.decodes)
        size = graphs.width_for(decodes)
        lines = self._rows.accept_decodes(plan, size)
        host_rows = lines[0, :decodes]
        slots = self._slots_of(host_rows)
        graph = graphs.replay(self._graph_inputs(lines, slots), size, slots is not None)
        if not self._sampler.needs(host_rows):
            return Sampled(graph.tokens[:decodes])
        rows, lengths = graph.inputs[:decodes], graph.inputs[size : size + decodes]
        return self._sample(graph.logits[:decodes], rows, lengths, host_rows)

    def _compute(self, inputs: Inputs) -> Sampled:
        rows, lengths = inputs.rows[: inputs.decodes], inputs.lengths[: inputs.decodes]
        slots = self._slots_of(inputs.host_token_rows)
        lora = self._adapters.batch(slots) if self._adapters is not None and slots is not None else None
        step = self._rows.device_step(rows, lengths, inputs.longest_decode, inputs.chunks, lora)
        hidden = self._model.forward(step, self._cache.layers)
        if not len(inputs.host_rows):
            return NO_TOKENS
        if inputs.chunks is not None:
            hidden = hidden[inputs.chunks.last]
        return self._sample(self._model.logits(hidden), inputs.rows, inputs.lengths, inputs.host_rows)

    def _sample(self, logits: Tensor, rows: Tensor, lengths: Tensor, host_rows: NDArray[np.integer]) -> Sampled:
        sampled = self._sampler.sample(logits, rows, lengths, host_rows)
        self._rows.newest_token[rows] = sampled.tokens
        return sampled

    def _slots_of(self, rows: NDArray[np.integer]) -> Numbers | None:
        return self._adapters.slots_of(rows) if self._adapters is not None else None

    def _graph_inputs(self, lines: Numbers, slots: Numbers | None) -> Numbers:
        """What a graph reads, in one line: `Rows.accept_decodes`, and the tokens' slots if adapters take part."""
        if slots is None:
            return lines.ravel()
        assert self._adapters is not None
        frame = self._adapters.frame(lines.shape[1])
        inputs = np.empty(lines.size + frame.numbers, np.int32)
        inputs[: lines.size] = lines.ravel()
        frame.write(slots, inputs[lines.size :])
        return inputs

    def _decode_any_length(self, inputs: Tensor, size: int, has_adapters: bool) -> tuple[Tensor, Tensor]:
        """A whole greedy decode step that is right for every length: the body of a graph."""
        rows, lengths, places, blocks = inputs[: 4 * size].view(4, size)
        self._rows.write_pages(places, blocks)
        lora = self._adapters.frame(size).view(inputs[4 * size :]) if self._adapters and has_adapters else None
        step = self._rows.device_step(rows, lengths, self.capacity.max_sequence_tokens, lora=lora)
        logits = self._model.logits(self._model.forward(step, self._cache.layers))
        tokens = argmax(logits)
        self._rows.newest_token[rows] = tokens
        return tokens, logits


def _only_decodes(plan: StepPlan) -> bool:
    """Whether a graph can serve the plan; every decode grows by a token, so it is granted one block at most."""
    return bool(plan.decodes) and not plan.chunks and not plan.seats and len(plan.grants) <= len(plan.decodes)


@torch.inference_mode()
def build_engine(config: EngineConfig) -> Engine:
    """Everything from a model folder to an engine that is ready for its first plan."""
    set_threads()
    folder = Path(config.model.model_path) if config.model.model_path else builtin_model_folder(config.quiet)
    spec = read_spec(folder)
    context = _context_length(config.model, spec)
    device = choose_device(config.model)
    dtype = choose_dtype(config.model, spec.dtype, device)
    backend = choose_backend(config.model, device)
    if config.model.load_format == "dummy":
        weights = dummy_weights(spec, device, dtype)
    else:
        weights = load_weights(folder, spec, device, dtype, config.quiet)
    rows = config.scheduler.max_running_requests
    slots, adapters = _adapters(config.lora, spec, dtype, device, backend, weights.size_bytes, rows)
    model = Llama(spec, weights, *_kernels(backend, device, spec.head_dim**-0.5), adapters)

    shape = CacheShape(spec.layers, spec.kv_heads, spec.head_dim, config.cache.kv_block_size, dtype)
    memory = device_memory(device, weights.size_bytes + adapters.bank.size_bytes)
    blocks = count_blocks(config.cache, shape, memory, device, context, rows)
    capacity = Capacity(blocks, shape.block_size, rows, context, slots)
    engine = Engine(model, spec, KVCache(blocks, shape, device), capacity, adapters)
    if backend == "triton" and config.model.enable_cuda_graphs:
        engine.capture(config.quiet)
    engine.warm_up()
    return engine


def _context_length(config: ModelConfig, spec: ModelSpec) -> int:
    if config.context_length is not None and config.context_length > spec.context_length:
        raise ConfigError(
            f"context_length is {config.context_length}, but the model was made for {spec.context_length} tokens; "
            f"ask for at most that, or leave it out."
        )
    return config.context_length or spec.context_length


def _adapters(
    config: LoraConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    weight_bytes: int,
    rows: int,
) -> tuple[int, Adapters]:
    """Slots that fit, and the adapters' side of the engine. The bank is made before KV takes what is left."""
    slots = count_slots(config, spec, dtype, device_memory(device, weight_bytes), device)
    bank = Bank(spec, slots + LANDINGS, config.max_lora_rank, dtype, device)
    project: Project = project_with_lora
    if backend == "triton":
        from rota.engine.lora.triton_ops import BesideProduct

        project = BesideProduct(device)
    read = checkpoint_reader(bank, spec, config.adapter_root)
    return slots, Adapters(bank, read, project, rows, config.enable_lora_overlap_loading)


def _kernels(backend: str, device: torch.device, scale: float) -> tuple[Operations, Attention]:
    if backend == "triton":
        # Here because Triton is there only where PyTorch has a GPU to use it on.
        from rota.engine.attention.triton_attention import TritonAttention
        from rota.engine.ops import fused

        return fused, TritonAttention(scale)
    return CPUOperations() if device.type == "cpu" else reference, TorchAttention(scale)
