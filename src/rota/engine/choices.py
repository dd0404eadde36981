"""Choices say how this machine computes a model; they are made before the weights are read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from rota.core.adapter import Extra
from rota.core.config import EngineConfig, FirstAdapters, ModelConfig
from rota.core.errors import ConfigError
from rota.engine.cpu import Processor, do_without_onednn, slowdown, this_processor
from rota.engine.device import (
    DeviceMemory,
    choose_backend,
    choose_device,
    choose_lora_backend,
    device_capability,
    device_memory,
)
from rota.engine.families.table import read_spec
from rota.engine.folders.builtin import builtin_model_folder
from rota.engine.kv_cache import DEFAULT_FRACTION, SENSIBLE_TOKENS, CacheShape, choose_cache_dtype
from rota.engine.lora.bank import pays_staging, slot_bytes
from rota.engine.lora.bank_size import (
    NO_BANK,
    BankRoom,
    BankSize,
    bytes_beside_kv,
    choose_matrices,
    choose_pages,
    choose_rank,
    choose_slots,
    has_pages,
    slots_over,
    useful_slots,
)
from rota.engine.lora.copies import can_batch
from rota.engine.lora.embed_head import embed_head_bytes, matrix_bytes
from rota.engine.lora.files.ranks import PAGE_RANK, pages_for
from rota.engine.lora.gain_bias import gain_bias_bytes
from rota.engine.lora.layout import fused_sites
from rota.engine.lora.packing import unturned_bytes
from rota.engine.model.sites import site_shapes
from rota.engine.model.spec import DTYPES, ModelSpec
from rota.engine.parallel.group import RankGroup
from rota.engine.parallel.shard import Shard
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.quantised.matrices import FourBit, GroupsFile, Kind
from rota.engine.weights.layouts.layout import Layout
from rota.engine.weights.layouts.table import read_layout
from rota.engine.weights.load import weight_bytes
from rota.engine.weights.makers import EightBitFloats, FourBitCodes, FourBitGroups

# Llama-8B's layers have 218 MB in eight bits, and 436 in sixteen. On an H200 a step of 2,048 tokens of the former is
# computed in less time than it is launched, and of the latter in more.
LIGHT_LAYER_BYTES = 300 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Model, device and kernels."""

    folder: Path
    whole: ModelSpec
    shard: Shard
    spec: ModelSpec  # of this rank's part
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype  # of keys and values
    maker: MatrixMaker | None  # of matrices in few bits
    backend: str
    lora_backend: str
    has_graphs: bool
    memory: DeviceMemory  # once the weights are loaded
    bank: BankSize = NO_BANK
    fused_lora_a: tuple[str, ...] = ()  # sites where the adapters' A lie below the model's matrices

    def sites_to_fuse(self, places: int, rank: int) -> tuple[str, ...]:
        """The sites at which so many slots or pages of this rank get a fused LoRA A; a maker's matrices have none."""
        may_fuse = self.lora_backend == "triton" and self.maker is None
        return fused_sites(self.spec, places, rank, self.dtype) if may_fuse else ()

    @property
    def is_light(self) -> bool:
        """Is a layer computed sooner than it is launched? Eight bits are multiplied in half the time of sixteen."""
        itemsize = 1 if isinstance(self.maker, EightBitFloats) else self.dtype.itemsize
        return self.spec.layer_numbers * itemsize <= LIGHT_LAYER_BYTES

    def with_bank(self, size: BankSize) -> Choices:
        """With a bank of this size, and fused LoRA A where they pay."""
        return replace(self, bank=size, fused_lora_a=self.sites_to_fuse(size.places, size.place_rank))


def choose(config: EngineConfig) -> Choices:
    """Raises ConfigError or ModelError if this machine cannot serve the model as configured."""
    folder = Path(config.model.model_path) if config.model.model_path else builtin_model_folder(config.quiet)
    whole = read_spec(folder)
    # The served length, not the model's: the rotary table of a million positions takes half a gigabyte.
    whole = replace(whole, context_length=_context_length(config.model, whole))
    shard = Shard(config.rank, config.model.tensor_parallel_size)
    spec = shard.local(whole)
    device = choose_device(config.model, config.device_number)
    processor = this_processor()
    dtype = choose_dtype(config.model, spec.dtype, device, processor)
    layout, capability = read_layout(folder), device_capability(device)
    maker = choose_maker(config.model, layout, GroupsFile(folder), dtype, processor, capability)
    backend = choose_backend(config.model, device)
    has_graphs = backend != "torch" and config.model.enable_cuda_graphs
    lora_backend = choose_lora_backend(config.lora, backend, device, has_graphs)
    return Choices(
        folder=folder,
        whole=whole,
        shard=shard,
        spec=spec,
        device=device,
        dtype=dtype,
        cache_dtype=choose_cache_dtype(config.cache, dtype, backend, device),
        maker=maker,
        backend=backend,
        lora_backend=lora_backend,
        has_graphs=has_graphs,
        memory=_memory_with_weights(weight_bytes(whole, dtype, shard, maker), device, sharers(config)),
    )


def _context_length(config: ModelConfig, spec: ModelSpec) -> int:
    if config.context_length is not None and config.context_length > spec.context_length:
        raise ConfigError(
            f"context_length is {config.context_length}, but the model was made for {spec.context_length} tokens; "
            f"set at most that, or leave it out."
        )
    return config.context_length or spec.context_length


def sharers(config: EngineConfig) -> int:
    """How many engines share this machine's processors and memory."""
    return config.model.replicas * config.local_ranks


def _memory_with_weights(size: int, device: torch.device, replicas: int = 1) -> DeviceMemory:
    """The device's memory once weights of so many bytes are loaded."""
    memory = device_memory(device, size, replicas=replicas)
    if device.type == "cpu":
        return memory
    if size > memory.total - memory.taken:
        raise ConfigError(
            f"The model's weights take {size >> 20} MiB, but only {(memory.total - memory.taken) >> 20} of the GPU's "
            f"{memory.total >> 20} MiB are free; free some, or serve a smaller model."
        )
    return DeviceMemory(memory.total, memory.taken + size)


# ── bank choice ─────────────────────────────────────────────────────────────────────────────────────────────────────
# All ranks of an engine agree on one bank: rank 0 knows the adapters at the start, and the least memory decides.


def choose_bank(config: EngineConfig, chosen: Choices, shape: CacheShape, group: RankGroup) -> BankSize:
    """The bank of every rank; waits for all ranks. Raises ConfigError if it does not fit."""
    assert config.first is not None, "the engine waited for it before it was built"
    first = _of_rank_0(config.first, group)
    rank, rank_from = choose_rank(config.lora, first)
    pages, extras = 0, Extra(first.extras)
    matrix = matrix_bytes(chosen.spec, chosen.dtype)
    matrices = group.least(choose_matrices(config.lora, first, matrix, _room(config, chosen, shape, rank)))
    apart_bytes = matrices * matrix
    if unpacks(chosen):
        apart_bytes += unturned_bytes(chosen.spec, rank, chosen.dtype)
    if has_pages(config.lora, first):
        room = _room(config, chosen, shape, PAGE_RANK, pages_for(rank))
        gain_bias = extra_bytes(chosen, extras, rank) * useful_slots(first.count, lambda _: ())
        room = replace(room, apart=gain_bias + apart_bytes)
        pages, pages_from = choose_pages(config.lora, rank, first, room)
        slots, slots_from = slots_over(pages, pages_from, config.lora, first)
    else:
        room = _room(config, chosen, shape, rank)
        place_bytes = room.place_bytes + extra_bytes(chosen, extras, rank)
        room = replace(room, place_bytes=place_bytes, apart=apart_bytes)
        slots, slots_from = choose_slots(config.lora, rank, first, room)
    least, least_pages = group.least(slots), group.least(pages)
    slots_from = slots_from if (least, least_pages) == (slots, pages) else "the memory of another rank"
    return BankSize(
        slots=least,
        rank=rank,
        pages=least_pages,
        extras=extras,
        matrices=matrices,
        slots_from=slots_from,
        rank_from=rank_from,
    )


def _of_rank_0(first: FirstAdapters, group: RankGroup) -> FirstAdapters:
    """Only rank 0 loads the adapters to start with: under torchrun the others may have been told of none."""
    told = {name: number if group.rank == 0 else sys.maxsize for name, number in asdict(first).items()}
    return FirstAdapters(**{name: group.least(number) for name, number in told.items()})


def unpacks(chosen: Choices) -> bool:
    """Do adapters stay packed in host memory? A rank of several reads parts of factors."""
    return can_batch(chosen.device) and chosen.shard.size == 1


def extra_bytes(chosen: Choices, extras: Extra, rank: int) -> int:
    """What one slot of this rank takes besides factors in the layers."""
    spec, tokens = chosen.spec, chosen.shard.tokens(chosen.whole.vocab_size)
    gain_bias = gain_bias_bytes(site_shapes(spec), spec.layers) if Extra.GAIN_BIAS in extras else 0
    return gain_bias + embed_head_bytes(spec, tokens.end - tokens.first, rank, chosen.dtype, extras)


def _room(config: EngineConfig, chosen: Choices, shape: CacheShape, rank: int, stage: int = 1) -> BankRoom:
    """For places of this rank; a staging buffer is as large as `stage` of them."""
    spec, dtype, device, memory = chosen.spec, chosen.dtype, chosen.device, chosen.memory
    fraction = config.cache.mem_fraction_static or DEFAULT_FRACTION[device.type]
    tokens = config.scheduler.max_running_requests * min(spec.context_length, SENSIBLE_TOKENS)
    return BankRoom(
        place_bytes=slot_bytes(spec, rank, dtype),
        more=stage if pays_staging(spec, rank, dtype, device) else 0,
        memory=memory,
        beside_kv=bytes_beside_kv(config.cache, shape, memory, fraction, tokens),
        sites_to_fuse=partial(chosen.sites_to_fuse, rank=rank),
    )


# ── precision ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Precision is chosen by what the device multiplies in hardware: numbers of 16 or 32 bits, or weights of four bits.

LOG = logging.getLogger("rota.engine")

IsAble = Callable[[torch.dtype], bool]


def choose_dtype(
    config: ModelConfig,
    folder_dtype: torch.dtype,
    device: torch.device,
    processor: Processor,
    is_able: IsAble | None = None,
) -> torch.dtype:
    """The configured precision; 'auto' takes the folder's, or the nearest that the device computes in hardware.

    A CPU never computes a bfloat16 model in float16: some values of such models are beyond float16's range, and one
    infinity makes every logit NaN. A GPU without bfloat16 does, since float32 would need twice its memory.
    """
    is_able = is_able or (lambda dtype: can_compute(dtype, device))
    is_native = is_able if device.type == "cuda" else processor.multiplies.__contains__
    if config.dtype == "auto":
        halves = [folder_dtype, torch.bfloat16] if folder_dtype is not torch.float32 else []
        if halves and device.type == "cuda":
            halves.append(torch.float16)
        return next((dtype for dtype in halves if is_native(dtype)), torch.float32)
    dtype = DTYPES[config.dtype]
    if not is_able(dtype):
        usable = [name for name, other in DTYPES.items() if is_able(other)]
        raise ConfigError(
            f"dtype is '{config.dtype}', which this {device.type} cannot compute with; use one of {', '.join(usable)}."
        )
    if device.type == "cpu" and dtype is not torch.float32 and not is_native(dtype):
        do_without_onednn()
        LOG.warning(
            f"dtype is {config.dtype}, for which this processor has no arithmetic: a product takes "
            f"{slowdown(dtype):.1f} times as long as in float32. --dtype auto would take float32."
        )
    return dtype


def choose_quantization(
    config: ModelConfig, is_stored: bool, device: torch.device, processor: Processor
) -> Kind | None:
    """A CPU's 4-bit product for a model's layers; None if the weights stay as they are.

    'auto' takes a 4-bit product only where four bits are stored: in the built-in model's file, whose adapters were
    tested so, and in AWQ and GPTQ folders.
    Where the config names a precision, 'auto' takes none: rounded weights would not be of that precision.
    """
    can_do = device.type == "cpu" and processor.four_bit is not None
    if config.quantization == "int4" and not can_do:
        reason = (
            f"the model runs on the {device.type}, and 4-bit products need a CPU"
            if device.type != "cpu"
            else "this processor has no fast product for it, which needs AVX2, AVX-512 or ARM's dot product"
        )
        raise ConfigError(f"quantization is 'int4', but {reason}. Use --quantization none.")
    is_wanted = config.quantization == "int4" or (
        config.quantization == "auto" and config.dtype == "auto" and is_stored
    )
    return processor.four_bit if is_wanted and can_do else None


def can_compute(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model of this precision runs on the device, at hardware speed where it is a GPU."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        x = torch.ones(2, 8, dtype=dtype, device=device)
        functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
        functional.rms_norm(functional.linear(x, x), (2,))
    except RuntimeError:
        return False
    return True


# ── few bits ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Few bits are chosen by what is asked for, by what the folder stores and by what the device multiplies.

# The first GPUs whose tensor cores multiply eight-bit floats: Ada, and Hopper after it.
FLOAT8_CAPABILITY = (8, 9)

Capability = tuple[int, int]


def choose_maker(
    config: ModelConfig,
    layout: Layout | None,
    groups: GroupsFile,
    dtype: torch.dtype,
    processor: Processor,
    capability: Capability | None,
) -> MatrixMaker | None:
    """Who makes the layers' matrices; None if they have the model's precision. A CPU has no `capability`."""
    if config.quantization == "fp8":
        _refuse_float8(layout, capability)
    if capability is None:
        return _on_cpu(config, layout, groups, dtype, processor)
    return _on_gpu(config, layout, dtype, capability)


def _on_gpu(
    config: ModelConfig, layout: Layout | None, dtype: torch.dtype, capability: Capability
) -> MatrixMaker | None:
    asked = config.quantization
    if asked == "int4" and (layout is None or layout.bits == 8):
        raise _no_int4(layout)
    if layout is None or asked == "none":
        return EightBitFloats() if asked == "fp8" else None
    if layout.bits == 4:
        return FourBitCodes(layout.holds, layout.group_size, dtype)
    if capability >= FLOAT8_CAPABILITY:
        return EightBitFloats(layout.holds)
    LOG.warning(
        f"The model's weights are in {layout.method}, which this GPU (compute capability {_words(capability)}) cannot "
        f"multiply: they take the form of {dtype}, and twice the memory."
    )
    return None


def _on_cpu(
    config: ModelConfig, layout: Layout | None, groups: GroupsFile, dtype: torch.dtype, processor: Processor
) -> MatrixMaker | None:
    """Four bits that a folder stores count like those of the built-in model; eight-bit floats become plain."""
    is_stored = layout is not None and layout.bits == 4
    kind = choose_quantization(config, groups.is_there or is_stored, torch.device("cpu"), processor)
    if kind is None:
        return None
    four_bit = FourBit(kind, groups)
    return FourBitGroups(layout.holds, four_bit, dtype) if layout is not None and is_stored else four_bit


def _refuse_float8(layout: Layout | None, capability: Capability | None) -> None:
    if capability is None or capability < FLOAT8_CAPABILITY:
        where = "the CPU" if capability is None else f"a GPU of compute capability {_words(capability)}"
        raise ConfigError(
            f"quantization is 'fp8', but the model runs on {where}, and products in eight-bit floats need a GPU of "
            f"{_words(FLOAT8_CAPABILITY)} or more (Ada, Hopper or newer). Use --quantization auto."
        )
    if layout is not None and layout.bits == 4:
        raise ConfigError(
            f"quantization is 'fp8', but the folder's weights are in four bits already ({layout.method}). Use "
            "--quantization auto, or a folder with plain weights."
        )


def _no_int4(layout: Layout | None) -> ConfigError:
    stored = "plain" if layout is None else f"in {layout.method}"
    return ConfigError(
        f"quantization is 'int4', but the model runs on a GPU, which has four bits only from an AWQ or GPTQ folder, "
        f"and this folder's weights are {stored}. Use --quantization fp8 or auto."
    )


def _words(capability: Capability) -> str:
    return ".".join(map(str, capability))
