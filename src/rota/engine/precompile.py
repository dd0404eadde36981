"""Kernels are compiled on a model of one layer while the weights of the real model are still being read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from rota.engine.stages import StageRecorder
from rota.engine.step.frames import Prompts


class Precompiles(Protocol):
    def precompile(self, prompts: Prompts) -> None: ...

    def close(self) -> None: ...


@contextmanager
def precompiled(
    build: Callable[[], Precompiles], prompts: Prompts, stage: StageRecorder | None = None
) -> Iterator[None]:
    """Compile in a thread beside the body; ends when both have ended. Triton keeps compiled kernels on disk too."""
    failures: list[Exception] = []
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
        except Exception as error:  # the border of a thread: the thread that waits raises the error
            failures.append(error)

    thread = threading.Thread(target=compile_all, name="rota-precompile")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]
