"""An engine is built from a model folder: kernels, weights, adapters, KV cache, graphs, in the order of dependence."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.engine.attention.torch_attention import TorchAttention
from rota.engine.autotune import AutotuneCache, StageRecorder
from rota.engine.choices import Choices, choose, choose_bank, extra_bytes, sharers, unpacks
from rota.engine.cpu import Threads, choose_threads, set_threads
from rota.engine.device import DeviceMemory, device_memory, free_memory
from rota.engine.engine import Engine
from rota.engine.families.decoder import Attention, Kernels
from rota.engine.families.table import make_model
from rota.engine.kv_cache import CacheShape, KVCache, count_blocks
from rota.engine.lora.adapters import Adapters, Project
from rota.engine.lora.bank import Bank, slot_bytes
from rota.engine.lora.base import BaseEmbedHead, BaseMatrices
from rota.engine.lora.embed_head import EmbedHead, EmbedHeadBank, matrix_bytes
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.checks import HeaderCheck, SlotKind
from rota.engine.lora.files.outline import Inquire, answer
from rota.engine.lora.files.reader import checked_first
from rota.engine.lora.growth import SlotGrowth
from rota.engine.lora.layout import fused_rows
from rota.engine.lora.loader import checkpoint_reader
from rota.engine.lora.reference import StackedProjector, add_with_gain_bias, project_with_lora
from rota.engine.model.sites import site_shapes
from rota.engine.ops.cpu import CPUOperations
from rota.engine.ops.reference import Operations
from rota.engine.parallel.gpu_group import join
from rota.engine.parallel.group import ONE_RANK, RankGroup
from rota.engine.step.frames import DECODE_STEP, PromptRoom
from rota.engine.weights.load import Weights, dummy_weights, load_weights
from rota.engine.weights.makers import EightBitFloats
from rota.sources.sources import sources_for

# ── precompile ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Kernels are compiled on a model of one layer while the weights of the real model are still being read.


@contextmanager
def precompiled(build: Callable[[], Engine], prompts: PromptRoom, stage: StageRecorder | None = None) -> Iterator[None]:
    """Compile in a thread beside the body; ends when both have ended. Triton keeps compiled kernels on disk too."""
    stage = stage or StageRecorder()

    def compile_all() -> None:
        try:
            with torch.inference_mode(), stage("kernels"):
                engine = build()
                engine.precompile(prompts)
                engine.close()
                del engine
                gc.collect()  # its memory must be free before memory is counted
        except torch.OutOfMemoryError:
            pass  # the weights leave no room: kernels are compiled when the real model first needs them

    with ThreadPoolExecutor(1, "rota-precompile") as pool:
        compiled = pool.submit(compile_all)
        yield
    compiled.result()


# KV blocks of an engine that only compiles kernels.
FEW_BLOCKS = 16


@torch.inference_mode()
def build_engine(
    config: EngineConfig,
    group: RankGroup | None = None,
    choices: Choices | None = None,
    stage: StageRecorder | None = None,
    autotuned: AutotuneCache | None = None,
    ask: Inquire = answer,
) -> Engine:
    """Read a model folder and return an engine that is ready for its first plan.

    One rank of several meets the others first, or takes part in the `group` that is given. `choices` are made unless
    they are given too. `stage` records how long each part takes, `autotuned` what is timed and chosen. `ask` has the
    files of adapters understood, elsewhere if they may be a tenant's.
    """
    stage = stage or StageRecorder()
    with ExitStack() as undone:  # a build that fails leaves no thread and no group
        with stage("device"):
            processors = set_threads(sharers(config))
            chosen = choices or choose(config)
            group = group or join(config.rank, config.model.tensor_parallel_size, chosen.device, config.meeting)
            undone.callback(group.close)
            chosen = chosen.with_bank(choose_bank(config, chosen, _cache_shape(config, chosen), group))
        prompts = PromptRoom(config.scheduler.chunked_prefill_size, chosen.is_light)
        one_layer = functools.partial(_one_layer, config, chosen)
        with precompiled(one_layer, prompts, stage) if chosen.has_graphs else nullcontext(), stage("weights"):
            weights = _weights(config, chosen)
        with stage("memory"):
            adapters = _adapters(config, chosen, weights, ask)
            undone.callback(adapters.close)
            blocks = _blocks(config, chosen, weights, adapters, group)
            engine = _assemble(config, chosen, weights, adapters, blocks, group)
        with stage("first step"):
            engine.warm_up()  # for steps that fit into no graph too
        with (autotuned or AutotuneCache()).in_use():
            if chosen.device.type == "cpu":
                with stage("tuning"):
                    engine.use_threads(_threads(config, processors, engine))
            if chosen.has_graphs:
                engine.capture(prompts, config.quiet, stage)
        with stage("warm-up"):
            engine.warm_up()  # once more, because the first time of a step is longer than all others
        undone.pop_all()
    engine.stages = stage.stages
    return engine


class Forecast(NamedTuple):
    """What an engine would have, by the files' headers alone."""

    chosen: Choices
    capacity: Capacity
    check: HeaderCheck  # of adapters


def forecast(config: EngineConfig) -> Forecast:
    """Reads no weights. Raises ConfigError or ModelError where `build_engine` would, as far as that can be known."""
    chosen = choose(config)
    chosen = chosen.with_bank(choose_bank(config, chosen, shape := _cache_shape(config, chosen), ONE_RANK))
    bank_bytes = chosen.bank.places * slot_bytes(chosen.spec, chosen.bank.place_rank, chosen.dtype)
    memory = DeviceMemory(chosen.memory.total, chosen.memory.taken + bank_bytes)
    rows, context = config.scheduler.max_running_requests, chosen.spec.context_length
    blocks = count_blocks(config.cache, shape, memory, chosen.device, context, rows)
    check = _header_check(chosen, Brought(config.lora.adapter_root, sources_for(config.lora)), answer)
    return Forecast(chosen, _capacity(config, chosen, blocks, bank_bytes), check)


def _blocks(config: EngineConfig, chosen: Choices, weights: Weights, adapters: Adapters, group: RankGroup) -> int:
    """How many KV blocks fit beside the weights and the bank, on the rank with least memory."""
    taken = weights.size_bytes + adapters.bank.size_bytes
    memory = device_memory(chosen.device, taken, replicas=sharers(config))
    rows, context = config.scheduler.max_running_requests, chosen.spec.context_length
    # A rank with less memory decides: all must hold the same blocks.
    return group.least(count_blocks(config.cache, _cache_shape(config, chosen), memory, chosen.device, context, rows))


def _threads(config: EngineConfig, processors: int, engine: Engine) -> Threads:
    """Ranks take all of their processors, and try nothing: to try a step takes all ranks."""
    asked = config.model.cpu_threads
    if config.model.tensor_parallel_size > 1 and asked == "auto":
        asked = processors
    return choose_threads(asked, processors, engine.seconds_of_step)


def _one_layer(config: EngineConfig, chosen: Choices) -> Engine:
    """An engine that needs every kernel of the real engine, but little memory, and no other rank."""
    torch.cuda.set_device(chosen.device)  # of this thread, for Triton's launches
    whole, spec = replace(chosen.whole, layers=1), replace(chosen.spec, layers=1)
    bank = replace(chosen.bank, slots=1, matrices=min(1, chosen.bank.matrices))
    chosen = replace(chosen, whole=whole, spec=spec, bank=bank, backend="triton")
    config = replace(config, model=replace(config.model, load_format="dummy"))
    weights = _weights(config, chosen)
    return _assemble(config, chosen, weights, _adapters(config, chosen, weights, answer), FEW_BLOCKS)


def _assemble(
    config: EngineConfig,
    chosen: Choices,
    weights: Weights,
    adapters: Adapters,
    blocks: int,
    group: RankGroup = ONE_RANK,
) -> Engine:
    spec, shape = chosen.spec, _cache_shape(config, chosen)
    model = make_model(
        spec, weights, Kernels(*_kernels(chosen), adapters.project, group, embed_head=adapters.embed_head)
    )
    capacity = _capacity(config, chosen, blocks, adapters.bank.size_bytes)
    return Engine(model, spec, KVCache(blocks, shape, chosen.device), capacity, adapters, group, chosen.shard)


def _capacity(config: EngineConfig, chosen: Choices, blocks: int, adapter_bytes: int) -> Capacity:
    spec, shape = chosen.spec, _cache_shape(config, chosen)
    return Capacity(
        blocks=blocks,
        block_size=shape.block_size,
        rows=config.scheduler.max_running_requests,
        max_sequence_tokens=spec.context_length,
        slots=chosen.bank.slots,
        adapter_bytes=adapter_bytes,
        slot_bytes=slot_bytes(spec, chosen.bank.rank, chosen.dtype) if chosen.bank.slots else 0,
        slot_rank=chosen.bank.rank,
        pages=chosen.bank.pages,
        matrices=chosen.bank.matrices,
        slots_from=chosen.bank.slots_from,
        rank_from=chosen.bank.rank_from,
        fused_lora_a=chosen.fused_lora_a,
        vocabulary=spec.vocab_size,
        deep_prefix=spec.deep_prefix,
        row_step=DECODE_STEP if chosen.is_light and chosen.has_graphs else 1,
        window=spec.widest_window,
        device=chosen.device.type,
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        dtype=str(chosen.dtype).removeprefix("torch."),
    )


def _weights(config: EngineConfig, chosen: Choices) -> Weights:
    whole, device, dtype, shard = chosen.whole, chosen.device, chosen.dtype, chosen.shard
    fused = fused_rows(chosen.spec, chosen.fused_lora_a, chosen.bank.places, chosen.bank.place_rank)
    if config.model.load_format == "dummy":
        return dummy_weights(whole, device, dtype, fused=fused, maker=chosen.maker, shard=shard)
    return load_weights(chosen.folder, whole, device, dtype, config.quiet, fused, chosen.maker, shard)


def _cache_shape(config: EngineConfig, chosen: Choices) -> CacheShape:
    spec = chosen.spec
    return CacheShape(spec.layers, spec.kv_heads, spec.head_dim, config.cache.kv_block_size, chosen.cache_dtype)


def _adapters(config: EngineConfig, chosen: Choices, weights: Weights, ask: Inquire) -> Adapters:
    """The bank, the loader and the projector. The bank is made first; the KV cache takes the memory that is left."""
    lora, size, growth = config.lora, chosen.bank, _growth(chosen)
    bank = Bank(
        chosen.spec,
        size.slots,
        size.rank,
        chosen.dtype,
        chosen.device,
        weights.fused_lora_a,
        pages=size.pages,
        base=BaseMatrices(weights.layers, site_shapes(chosen.spec), chosen.dtype, chosen.device),
        embed_head=(embed_head_bank := _embed_head_bank(chosen, weights)),
        extras=size.extras,
        growth=growth,
        unpacks=unpacks(chosen),
    )
    project, embed_head = _projector(chosen, bank, embed_head_bank)
    brought = Brought(lora.adapter_root, sources_for(lora))
    read = checkpoint_reader(bank, chosen.whole, brought, chosen.shard, ask)
    rows, overlaps = config.scheduler.max_running_requests, lora.enable_lora_overlap_loading
    check = _header_check(chosen, brought, ask, growth)
    read = checked_first(read, check.refuse)
    return Adapters(bank, read, project, rows, overlaps, chosen.shard.size, check, embed_head)


def _header_check(chosen: Choices, brought: Brought, ask: Inquire, growth: SlotGrowth | None = None) -> HeaderCheck:
    size, matrix = chosen.bank, matrix_bytes(chosen.spec, chosen.dtype)
    slots = SlotKind(size.rank, size.extras, chosen.shard.size, size.matrices, matrix, growth)
    return HeaderCheck(chosen.whole, slots, brought, ask)


def _growth(chosen: Choices) -> SlotGrowth | None:
    """Ranks would have to grow in the same step: they have what their first adapters need."""
    if chosen.shard.size > 1:
        return None
    size, rank = chosen.bank, chosen.bank.rank
    return SlotGrowth(
        size.extras,
        lambda extras: size.slots * extra_bytes(chosen, extras, rank),
        functools.partial(free_memory, chosen.device),
    )


def _projector(chosen: Choices, bank: Bank, embed_head: EmbedHeadBank) -> tuple[Project, EmbedHead]:
    """How adapters are applied at the sites, and at the ends."""
    if chosen.lora_backend == "triton":
        from rota.engine.lora.triton_embed_head import TritonEmbedHead
        from rota.engine.lora.triton_ops import TritonProjector

        return TritonProjector(bank.device), TritonEmbedHead(embed_head)
    on_cpu = chosen.device.type == "cpu"
    project: Project = StackedProjector(bank) if on_cpu else project_with_lora
    # A head has batches of its own, and so stacks of its own.
    add = StackedProjector(bank).add if on_cpu else add_with_gain_bias
    return project, EmbedHead(embed_head, add)


def _embed_head_bank(chosen: Choices, weights: Weights) -> EmbedHeadBank:
    tokens, size = chosen.shard.tokens(chosen.whole.vocab_size), chosen.bank
    own, base = tokens.end - tokens.first, BaseEmbedHead(size.extras, weights.embedding, weights.head, size.matrices)
    return EmbedHeadBank(chosen.spec, own, size.slots, size.rank, chosen.dtype, chosen.device, base)


def _kernels(chosen: Choices) -> tuple[Operations, Attention]:
    spec, device = chosen.spec, chosen.device
    # Imported here: Triton is installed only where PyTorch has a GPU.
    if chosen.backend == "flashinfer":
        from rota.engine.attention.flashinfer_attention import FlashInferAttention

        return _fused(chosen), FlashInferAttention(spec.attention_scale, spec.head_dim, chosen.dtype, device)
    if chosen.backend == "triton":
        from rota.engine.attention.triton_attention import TritonAttention

        return _fused(chosen), TritonAttention(spec.attention_scale)
    return CPUOperations() if device.type == "cpu" else Operations(), TorchAttention(spec.attention_scale)


def _fused(chosen: Choices) -> Operations:
    from rota.engine.ops.fused import FusedOperations

    return FusedOperations(rounds=isinstance(chosen.maker, EightBitFloats))
