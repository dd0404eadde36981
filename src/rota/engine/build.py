"""Building an engine: everything from a model folder to kernels, memory and graphs, in the order they depend on it."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from rota.core.config import LANDINGS, Capacity, EngineConfig, LoraConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.engine.attention.torch_attention import TorchAttention
from rota.engine.builtin import builtin_model_folder
from rota.engine.device import DeviceMemory, choose_backend, choose_device, choose_lora_backend, device_memory
from rota.engine.engine import Engine
from rota.engine.kv_cache import CacheShape, KVCache, count_blocks
from rota.engine.lora.adapters import Adapters, Project
from rota.engine.lora.annex import annex_rows, annexed_sites
from rota.engine.lora.bank import Bank, count_slots
from rota.engine.lora.loader import checkpoint_reader
from rota.engine.lora.reference import project_with_lora
from rota.engine.lora.stacked import StackedProjector
from rota.engine.model.llama import Llama
from rota.engine.model.spec import ModelSpec, read_spec
from rota.engine.ops import reference
from rota.engine.ops.cpu import CPUOperations
from rota.engine.precision import choose_dtype, choose_quantization
from rota.engine.processor import look
from rota.engine.quantised.files import GroupsFile
from rota.engine.quantised.matrices import FourBit
from rota.engine.rehearsal import rehearsal
from rota.engine.step import Attention, Operations
from rota.engine.threads import choose_threads, set_threads
from rota.engine.weights import dummy_weights, load_weights, weight_bytes

REHEARSED_BLOCKS = 16


@torch.inference_mode()
def build_engine(config: EngineConfig) -> Engine:
    """Everything from a model folder to an engine that is ready for its first plan."""
    processors = set_threads()
    folder = Path(config.model.model_path) if config.model.model_path else builtin_model_folder(config.quiet)
    spec = read_spec(folder)
    context = _context_length(config.model, spec)
    # What is served, not what the model allows: the rotary table of a million positions takes half a gigabyte.
    spec = replace(spec, context_length=context)
    device = choose_device(config.model)
    processor = look()
    dtype = choose_dtype(config.model, spec.dtype, device, processor)
    groups = GroupsFile(folder)
    quantization = choose_quantization(config.model, groups.is_there, device, processor)
    four_bit = FourBit(quantization, groups) if quantization is not None else None
    backend = choose_backend(config.model, device)
    budget = config.scheduler.chunked_prefill_size
    has_graphs = backend != "torch" and config.model.enable_cuda_graphs
    lora_backend = choose_lora_backend(config.lora, backend, device, has_graphs)
    # Before anything is read: it decides where adapters lie, and whoever asks for too many hears it at once.
    slots = count_slots(config.lora, spec, dtype, _memory_with_weights(spec, dtype, device), device)
    places, max_rank = slots + LANDINGS, config.lora.max_lora_rank
    sites = annexed_sites(spec, places, max_rank, dtype) if lora_backend == "triton" else ()
    annex = annex_rows(spec, sites, places, max_rank)
    one_layer = functools.partial(_one_layer, config, spec, device, dtype, context, sites)
    with rehearsal(one_layer, budget) if has_graphs else nullcontext():
        if config.model.load_format == "dummy":
            weights = dummy_weights(spec, device, dtype, annex=annex, four_bit=four_bit)
        else:
            weights = load_weights(folder, spec, device, dtype, config.quiet, annex, four_bit)
    rows = config.scheduler.max_running_requests
    bank = Bank(spec, places, max_rank, dtype, device, weights.annexes)
    adapters = _adapters(config.lora, bank, spec, lora_backend, rows)
    model = Llama(spec, weights, *_kernels(backend, device, spec.head_dim, dtype), adapters)

    shape = CacheShape(spec.layers, spec.kv_heads, spec.head_dim, config.cache.kv_block_size, dtype)
    memory = device_memory(device, weights.size_bytes + adapters.bank.size_bytes)
    blocks = count_blocks(config.cache, shape, memory, device, context, rows)
    capacity = Capacity(blocks, shape.block_size, rows, context, slots, spec.vocab_size)
    engine = Engine(model, spec, KVCache(blocks, shape, device), capacity, adapters)
    engine.warm_up()  # also of what fits into no graph
    if device.type == "cpu":
        engine.share_threads(choose_threads(config.model.cpu_threads, processors, engine.seconds_of_step))
    if has_graphs:
        engine.capture(budget, config.quiet)
        engine.warm_up()
    return engine


def _one_layer(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    sites: tuple[str, ...],
) -> Engine:
    """An engine that needs every kernel the real one needs, and hardly any memory."""
    spec, slots, max_rank = replace(spec, layers=1), 1, config.lora.max_lora_rank
    rows, block_size = config.scheduler.max_running_requests, config.cache.kv_block_size
    places = slots + LANDINGS
    weights = dummy_weights(spec, device, dtype, annex=annex_rows(spec, sites, places, max_rank))
    bank = Bank(spec, places, max_rank, dtype, device, weights.annexes)
    adapters = _adapters(config.lora, bank, spec, "triton", rows)
    model = Llama(spec, weights, *_kernels("triton", device, spec.head_dim, dtype), adapters)
    shape = CacheShape(spec.layers, spec.kv_heads, spec.head_dim, block_size, dtype)
    capacity = Capacity(REHEARSED_BLOCKS, block_size, rows, context, slots)
    return Engine(model, spec, KVCache(REHEARSED_BLOCKS, shape, device), capacity, adapters)


def _context_length(config: ModelConfig, spec: ModelSpec) -> int:
    if config.context_length is not None and config.context_length > spec.context_length:
        raise ConfigError(
            f"context_length is {config.context_length}, but the model was made for {spec.context_length} tokens; "
            f"ask for at most that, or leave it out."
        )
    return config.context_length or spec.context_length


def _memory_with_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DeviceMemory:
    """What the device will have once the weights are there."""
    size = weight_bytes(spec, dtype)
    memory = device_memory(device, size)
    if device.type == "cpu":
        return memory
    if size > memory.total - memory.taken:
        raise ConfigError(
            f"The model's weights take {size >> 20} MiB, but only {(memory.total - memory.taken) >> 20} of the GPU's "
            f"{memory.total >> 20} MiB are free; free some, or serve a smaller model."
        )
    return DeviceMemory(memory.total, memory.taken + size)


def _adapters(config: LoraConfig, bank: Bank, spec: ModelSpec, backend: str, rows: int) -> Adapters:
    """The adapters' side of the engine. The bank is made before KV takes what is left."""
    project: Project = StackedProjector(bank) if bank.device.type == "cpu" else project_with_lora
    if backend == "triton":
        from rota.engine.lora.triton_ops import TritonProjector

        project = TritonProjector(bank.device)
    read = checkpoint_reader(bank, spec, config.adapter_root)
    return Adapters(bank, read, project, rows, config.enable_lora_overlap_loading)


def _kernels(backend: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> tuple[Operations, Attention]:
    scale = head_dim**-0.5
    # Here because Triton is there only where PyTorch has a GPU to use it on.
    if backend == "flashinfer":
        from rota.engine.attention.flashinfer_attention import FlashInferAttention
        from rota.engine.ops import fused

        return fused, FlashInferAttention(head_dim, dtype, device)
    if backend == "triton":
        from rota.engine.attention.triton_attention import TritonAttention
        from rota.engine.ops import fused

        return fused, TritonAttention(scale)
    return CPUOperations() if device.type == "cpu" else reference, TorchAttention(scale)
