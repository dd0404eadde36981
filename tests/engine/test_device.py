"""What the operator asks of a machine is given or refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rota.core.config import LoraConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.engine.device import (
    choose_backend,
    choose_device,
    choose_lora_backend,
    device_memory,
    fetch,
    send,
)

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_asking_for_a_gpu_where_there_is_none_says_what_works():
    with pytest.raises(ConfigError, match="no CUDA GPU here; use --device cpu"):
        choose_device(ModelConfig(device="cuda"))


def test_auto_prefers_a_gpu_and_a_cpu_can_be_asked_for():
    assert choose_device(ModelConfig()).type == ("cuda" if HAS_GPU else "cpu")
    assert choose_device(ModelConfig(device="cpu")) == CPU


def test_more_ranks_than_gpus_are_refused_with_how_many_there_are(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)

    assert choose_device(ModelConfig(), 1) == torch.device("cuda", 1)
    with pytest.raises(
        ConfigError, match="GPU 2 is wanted, counted from 0, but there are 2 here: tensor_parallel_size"
    ):
        choose_device(ModelConfig(), 2)
    assert choose_device(ModelConfig(device="cpu"), 2) == CPU  # CPUs have no such limit


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
    monkeypatch.setattr("rota.engine.device.find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"pip install 'flashinfer-python[<>=.,0-9]+', or use --attention-backend triton"
    ):
        choose_backend(asked, gpu)
    monkeypatch.setattr("rota.engine.device.find_spec", lambda name: name)
    assert choose_backend(asked, gpu) == "flashinfer"
    assert choose_lora_backend(LoraConfig(), "flashinfer", gpu, has_graphs=True) == "triton"


def test_a_container_s_memory_limit_counts_and_no_limit_means_the_machine_s(tmp_path: Path):
    machine = device_memory(CPU, weights=7, limits=tmp_path / "none")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert device_memory(CPU, weights=7, limits=tmp_path).total == 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory(CPU, weights=7, limits=tmp_path) == machine
    assert machine.taken == 7
    assert device_memory(CPU, weights=7, limits=tmp_path, replicas=4).total == machine.total // 4


def test_arrays_go_to_the_device_and_come_back():
    device = choose_device(ModelConfig())
    there = send(torch.arange(5).numpy(), device)
    back = fetch(there * 2)
    if device.type == "cuda":
        assert there.is_cuda
        assert back.is_pinned()
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
