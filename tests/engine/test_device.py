"""What the operator asks of a machine is given or refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rota.core.config import LoraConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.engine.device import (
    can_compute,
    choose_backend,
    choose_device,
    choose_dtype,
    choose_lora_backend,
    device_memory,
    fetch,
    send,
    usable_processors,
)

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()


def only_float32(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype is torch.float32


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_asking_for_a_gpu_where_there_is_none_says_what_works():
    with pytest.raises(ConfigError, match="no CUDA GPU here; use --device cpu"):
        choose_device(ModelConfig(device="cuda"))


def test_auto_prefers_a_gpu_and_a_cpu_can_be_asked_for():
    assert choose_device(ModelConfig()).type == ("cuda" if HAS_GPU else "cpu")
    assert choose_device(ModelConfig(device="cpu")) == CPU


def test_triton_on_a_cpu_is_refused_and_auto_takes_what_fits_the_device():
    with pytest.raises(ConfigError, match=r"need a GPU.*--attention-backend torch"):
        choose_backend(ModelConfig(attention_backend="triton"), CPU)
    assert choose_backend(ModelConfig(), CPU) == "torch"
    assert choose_backend(ModelConfig(), torch.device("cuda")) == "triton"
    assert choose_backend(ModelConfig(attention_backend="torch"), torch.device("cuda")) == "torch"


def test_flashinfer_needs_a_gpu_and_to_be_installed(monkeypatch):
    asked, gpu = ModelConfig(attention_backend="flashinfer"), torch.device("cuda")
    with pytest.raises(ConfigError, match=r"'flashinfer', whose kernels need a GPU"):
        choose_backend(asked, CPU)
    monkeypatch.setattr("rota.engine.device.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rota\[flashinfer\]', or use --attention-backend triton"):
        choose_backend(asked, gpu)
    monkeypatch.setattr("rota.engine.device.find_spec", lambda name: name)
    assert choose_backend(asked, gpu) == "flashinfer"
    assert choose_lora_backend(LoraConfig(), "flashinfer", gpu, has_graphs=True) == "triton"


def test_auto_takes_the_precision_of_the_folder():
    assert choose_dtype(ModelConfig(), torch.float32, CPU) is torch.float32
    assert choose_dtype(ModelConfig(dtype="float32"), torch.bfloat16, CPU) is torch.float32


def test_a_precision_the_device_cannot_do_is_refused_with_those_it_can():
    with pytest.raises(ConfigError, match=r"'float16', which this cpu cannot.*one of float32"):
        choose_dtype(ModelConfig(dtype="float16"), torch.float32, CPU, only_float32)


def test_auto_falls_back_to_what_the_device_can_do():
    assert choose_dtype(ModelConfig(), torch.float16, CPU, only_float32) is torch.float32


def test_a_device_is_asked_and_not_assumed_to_compute_a_precision():
    assert can_compute(torch.float32, CPU)
    assert not can_compute(torch.int8, CPU)


def test_a_container_s_memory_limit_counts_and_no_limit_means_the_machine_s(tmp_path: Path):
    machine = device_memory(CPU, weights=7, limits=tmp_path / "none")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert device_memory(CPU, weights=7, limits=tmp_path).total == 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory(CPU, weights=7, limits=tmp_path) == machine
    assert machine.taken == 7


@pytest.mark.parametrize(("quota", "usable"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 8)])
def test_a_container_s_processor_time_limits_the_threads(tmp_path: Path, quota: str, usable: int):
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_processors(8, tmp_path) == usable


def test_arrays_go_to_the_device_and_come_back():
    device = choose_device(ModelConfig())
    there = send(torch.arange(5).numpy(), device)
    back = fetch(there * 2)
    if device.type == "cuda":
        assert there.is_cuda and back.is_pinned()
        torch.cuda.synchronize()
    assert back.tolist() == [0, 2, 4, 6, 8]


def test_adapters_kernels_go_with_the_attentions_unless_others_are_named():
    gpu = torch.device("cuda")
    assert choose_lora_backend(LoraConfig(), "triton", gpu, has_graphs=True) == "triton"
    assert choose_lora_backend(LoraConfig(), "torch", CPU, has_graphs=False) == "torch"
    assert choose_lora_backend(LoraConfig(lora_backend="torch"), "triton", gpu, has_graphs=False) == "torch"


def test_adapters_kernels_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"need a GPU.*--lora-backend torch"):
        choose_lora_backend(LoraConfig(lora_backend="triton"), "torch", CPU, has_graphs=False)
    with pytest.raises(ConfigError, match=r"a CUDA graph cannot.*--no-enable-cuda-graphs"):
        choose_lora_backend(LoraConfig(lora_backend="torch"), "triton", torch.device("cuda"), has_graphs=True)
