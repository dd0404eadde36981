"""The device and its kernels are chosen by config and machine; arrays are copied to the device and back."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.config import LoraConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.core.version import how_to_install
from rota.machine import LIMITS, read_words

# Where Linux says what processes can still have.
MEMORY = Path("/proc/meminfo")
# On a GPU: graphs that are captured later, and workspaces of libraries.
KEPT_FREE = 256 << 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device: all, and those already taken by any process."""

    total: int
    taken: int


def choose_device(config: ModelConfig, number: int = 0) -> torch.device:
    """The configured device; 'auto' prefers a GPU. Of several GPUs, that of this number, for every thread that asks."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "device is 'cuda', but PyTorch finds no CUDA GPU here; use --device cpu, or install a driver and a CUDA "
            "build of PyTorch."
        )
    if config.device == "cpu" or not has_gpu:
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if number >= found:
        raise ConfigError(
            f"GPU {number} is wanted, counted from 0, but there {'is' if found == 1 else 'are'} {found} here: "
            f"tensor_parallel_size times data_parallel_size may be at most {found}."
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """What a GPU's instructions are called; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def choose_backend(config: ModelConfig, device: torch.device) -> str:
    """The configured kernels; 'auto' takes Triton on a GPU and torch on a CPU."""
    asked = config.attention_backend
    if asked in ("triton", "flashinfer") and device.type == "cpu":
        raise ConfigError(
            f"attention_backend is '{asked}', whose kernels need a GPU, but the model runs on the CPU; use "
            "--attention-backend torch."
        )
    if asked == "flashinfer" and find_spec("flashinfer") is None:
        raise ConfigError(
            f"attention_backend is 'flashinfer', which is not installed here: {how_to_install('flashinfer')}, or use "
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
            "lora_backend is 'torch', which reads a step's adapters on the host, but a CUDA graph cannot do so; add "
            "--no-enable-cuda-graphs, or use --lora-backend triton."
        )
    if config.lora_backend == "auto":
        return "torch" if attention == "torch" else "triton"
    return config.lora_backend


def device_memory(device: torch.device, weights: int, limits: Path = LIMITS, replicas: int = 1) -> DeviceMemory:
    """The device's memory, once `weights` bytes of weights are loaded. On a CPU the replicas share it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, total - free)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_words(limits / "memory.max")  # a number, or "max"
    total = min(total, int(limit[0])) if limit and limit[0].isdigit() else total
    return DeviceMemory(total // replicas, weights)


def free_memory(device: torch.device) -> int:
    """The bytes that can still be had while an engine runs, less what its steps may need."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, free - KEPT_FREE)
    words = read_words(MEMORY)
    return int(words[words.index("MemAvailable:") + 1]) * 1024 if "MemAvailable:" in words else sys.maxsize


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU what is never written costs no memory."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # The system allocates the pages of NumPy's zeros at the first write.
    raw = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)


def send(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting; on a CPU the tensor shares the array's memory.

    The pinned memory comes from torch's caching allocator. The allocator remembers which copies read the memory, and
    reuses it only when they are done. So the caller need not keep it alive, nor count the steps in flight.
    """
    if device.type == "cpu":
        return torch.from_numpy(values)
    staged = torch.from_numpy(values).pin_memory()
    return staged.to(device, non_blocking=True)


def staging(length: int, device: torch.device) -> Tensor:
    """[length] int32 on the host, to be written and then sent: what is large is not copied once more to pin it.

    Torch copies a megabyte with all its threads, and those take milliseconds to wake beside threads of other libraries
    (masks of 64 rows on an H200, 2026-11-16: up to 8 ms).
    """
    return torch.empty(length, dtype=torch.int32, pin_memory=device.type == "cuda")


def fetch(values: Tensor) -> Tensor:
    """Start copying a tensor to pinned host memory; read it only after an event recorded behind this call."""
    if values.device.type == "cpu":
        return values
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return staged.copy_(values, non_blocking=True)
