"""The machine answers what was asked of it: which device, which precision, how much memory, how many threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rota.core.config import LoraConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.engine.model.spec import DTYPES

# Where Linux says what a container may use.
LIMITS = Path("/sys/fs/cgroup")
IsAble = Callable[[torch.dtype, torch.device], bool]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device: all there are, and those already taken by anybody."""

    total: int
    taken: int


def choose_device(config: ModelConfig) -> torch.device:
    """The device that was asked for; 'auto' prefers a GPU."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "device is 'cuda', but PyTorch finds no CUDA GPU here; use --device cpu, or install a driver and a CUDA "
            "build of PyTorch."
        )
    if config.device == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_backend(config: ModelConfig, device: torch.device) -> str:
    """The kernels that were asked for; 'auto' takes Triton on a GPU and torch on a CPU."""
    asked = config.attention_backend
    if asked in ("triton", "flashinfer") and device.type == "cpu":
        raise ConfigError(
            f"attention_backend is '{asked}', whose kernels need a GPU, but the model runs on the CPU; use "
            "--attention-backend torch."
        )
    if asked == "flashinfer" and find_spec("flashinfer") is None:
        raise ConfigError(
            "attention_backend is 'flashinfer', which is not installed here; pip install 'rota[flashinfer]', or use "
            "--attention-backend triton."
        )
    if asked == "auto":
        return "triton" if device.type == "cuda" else "torch"
    return asked


def choose_lora_backend(config: LoraConfig, attention: str, device: torch.device, has_graphs: bool) -> str:
    """The adapters' kernels; 'auto' takes those of the same kind as the attention's."""
    if config.lora_backend == "triton" and device.type == "cpu":
        raise ConfigError(
            "lora_backend is 'triton', whose kernels need a GPU, but the model runs on the CPU; use "
            "--lora-backend torch."
        )
    if config.lora_backend == "torch" and has_graphs:
        raise ConfigError(
            "lora_backend is 'torch', which asks on the host who is in a step, and a CUDA graph cannot; add "
            "--no-enable-cuda-graphs, or use --lora-backend triton."
        )
    if config.lora_backend == "auto":
        return "torch" if attention == "torch" else "triton"
    return config.lora_backend


def choose_dtype(
    config: ModelConfig, folder_dtype: torch.dtype, device: torch.device, is_able: IsAble | None = None
) -> torch.dtype:
    """The precision that was asked for; 'auto' takes the folder's, or the nearest that the device can do."""
    is_able = is_able or can_compute
    if config.dtype == "auto":
        candidates = (folder_dtype, torch.bfloat16, torch.float16)
        return next((dtype for dtype in candidates if is_able(dtype, device)), torch.float32)
    dtype = DTYPES[config.dtype]
    if not is_able(dtype, device):
        usable = [name for name, other in DTYPES.items() if is_able(other, device)]
        raise ConfigError(
            f"dtype is '{config.dtype}', which this {device.type} cannot compute with; use one of {', '.join(usable)}."
        )
    return dtype


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


def device_memory(device: torch.device, weights: int, limits: Path = LIMITS) -> DeviceMemory:
    """What the device has, once `weights` bytes of weights are loaded."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, total - free)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_words(limits / "memory.max")  # a number, or "max"
    return DeviceMemory(min(total, int(limit[0])) if limit and limit[0].isdigit() else total, weights)


def set_threads() -> None:
    """Let torch use the processors this process may use; a user's OMP_NUM_THREADS stands."""
    # oneDNN keeps a thousand compiled products, and torch's layer above it as many descriptions of them: hundreds of
    # megabytes for the many lengths of a server's life. 256 hold what padded rows ask for; with 64 a prompt's adapter
    # products took twice as long. Both look at this before their first product.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_processors(torch.get_num_threads()))


def usable_processors(found: int, limits: Path = LIMITS) -> int:
    """Of the processors found, those a container grants the time of: "200000 100000" means two."""
    quota = _read_words(limits / "cpu.max")
    if quota and quota[0].isdigit():
        return min(found, max(1, int(quota[0]) // int(quota[1])))
    return found


def send(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it; on a CPU the tensor is the array.

    The pinned memory comes from torch's caching allocator, which remembers the copies that read it and hands it
    out again only when they are done: nobody has to keep it alive or count how many steps are in flight.
    """
    if device.type == "cpu":
        return torch.from_numpy(values)
    staged = torch.from_numpy(values).pin_memory()
    return staged.to(device, non_blocking=True)


def fetch(values: Tensor) -> Tensor:
    """Start copying a tensor to pinned host memory; it may be read once an event recorded after this has passed."""
    if values.device.type == "cpu":
        return values
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return staged.copy_(values, non_blocking=True)


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
