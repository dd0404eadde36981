"""An engine is built beside the reading of weights, tells what it does, and knows then how long tokens take."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

import rota.engine
from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.core.errors import ModelError
from rota.engine.build import build_engine, precompiled
from rota.engine.step.frames import PromptRoom
from rota.llm.config import ON_GPU
from rota.start import START
from tests.engine.model_factory import make_tiny_model
from tests.processes import run_program
from tests.waiting import TIMEOUT_S

PROMPTS = PromptRoom(512)


class Compiling:
    """Notes what was compiled once it may; raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_go_on = threading.Event()
        self.compiled: list[PromptRoom] = []
        self.is_closed = False
        self._error = error

    def precompile(self, prompts: PromptRoom) -> None:
        assert self.may_go_on.wait(TIMEOUT_S)
        if self._error:
            raise self._error
        self.compiled.append(prompts)

    def close(self) -> None:
        self.is_closed = True


def test_it_runs_beside_the_body_and_is_over_when_that_ends():
    engine = Compiling()
    with precompiled(lambda: engine, PROMPTS):
        assert engine.compiled == []
        engine.may_go_on.set()
    assert engine.compiled == [PROMPTS]
    assert engine.is_closed


def test_a_device_without_room_for_it_goes_without():
    engine = Compiling(torch.OutOfMemoryError("full"))
    with precompiled(lambda: engine, PROMPTS):
        engine.may_go_on.set()
    assert engine.compiled == []


def test_what_else_goes_wrong_is_told():
    engine = Compiling(RuntimeError("a kernel does not compile"))
    with pytest.raises(RuntimeError, match="does not compile"), precompiled(lambda: engine, PROMPTS):
        engine.may_go_on.set()


def test_weights_that_cannot_be_read_are_what_is_told_first():
    engine = Compiling(RuntimeError("a kernel does not compile"))

    def read_weights() -> None:
        with precompiled(lambda: engine, PROMPTS):
            engine.may_go_on.set()
            raise ModelError("There are no weights.")

    with pytest.raises(ModelError, match="no weights"):
        read_weights()


def test_a_built_engine_has_told_of_its_work_and_has_timed_its_tokens(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(START, "tell_progress", told.append)
    make_tiny_model(tmp_path, "llama3")
    config = EngineConfig(
        model=ModelConfig(model_path=str(tmp_path), device="cpu"),
        cache=CacheConfig(kv_blocks=8),
        scheduler=SchedulerConfig(max_running_requests=2),
        quiet=True,
    )
    engine = build_engine(config)
    engine.close()

    assert {f"Loading {tmp_path.name}", "Warming up"} <= set(told)
    assert 0.0 < engine.capacity.token_s < 60.0
    assert 0.0 < engine.capacity.decode_s < 60.0


# What a spare imports ahead: every module with kernels, and nothing that touches a GPU.

PACKAGE = Path(rota.engine.__file__).parent
WITH_KERNELS = re.compile(r"^(import|from) triton\b", re.M)

IMPORT = """
import os, sys
from rota.llm.config import import_device
import_device(sys.argv[1])
import torch
assert not torch.cuda.is_initialized()
opened = [os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry)]
assert not [path for path in opened if path.startswith("/dev/nvidia")], opened
print(*sorted(name for name in sys.modules if name.startswith("rota.engine.")))
"""


def imported(device: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return run_program([sys.executable, "-c", IMPORT, device], env=environment).stdout.split()


def test_all_kernels_are_imported_for_a_gpu_and_the_gpu_is_not_opened():
    pytest.importorskip("triton")
    files = [path for path in PACKAGE.rglob("*.py") if WITH_KERNELS.search(path.read_text("utf-8"))]
    names = {".".join(("rota.engine", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in files}
    assert {*ON_GPU} <= names

    assert names - {*imported("cuda")} == set()
