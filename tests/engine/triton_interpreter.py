"""Kernels run on the GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str) -> ModuleType:
    """Import a module of kernels so that they run here, whoever imported Triton or the module before."""
    if DEVICE == "cuda":
        return importlib.import_module(name)
    # Triton looks at this when it decorates a kernel.
    os.environ["TRITON_INTERPRET"] = "1"
    _interpret_standard_library()
    _leave_out_what_has_no_effect()
    _round_to_eight_bits_as_torch_does()
    already = [module for module in sys.modules if module.startswith("rota.engine") and _has_compiled(module)]
    for module in already:
        del sys.modules[module]
    return importlib.import_module(name)


def _interpret_standard_library() -> None:
    """Turn `tl.sum` and its like around if Triton was imported (transformers does) before the variable was set."""
    import triton
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    for name, member in list(vars(tl.standard).items()):
        if isinstance(member, JITFunction):
            interpreted = triton.jit(member.fn)
            setattr(tl.standard, name, interpreted)
            if hasattr(tl, name):
                setattr(tl, name, interpreted)


@functools.cache
def _leave_out_what_has_no_effect() -> None:
    """About half of the time of Triton 3.7's interpreter: it looks for overflows whose check is off, and makes the
    language anew for every function that a kernel calls."""
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = replace(interpreter.InterpreterOptions(), sanitize_overflow=False)
    patch = interpreter._patch_lang

    @functools.cache
    def patched(kernel: Any) -> Any:
        patch(kernel)
        return interpreter._LangPatchScope()  # which has nothing to undo: the next kernel finds the language as it is

    interpreter._patch_lang = patched


def _round_to_eight_bits_as_torch_does() -> None:
    """Triton 3.7's interpreter forgets the carry of a number that is rounded up to a power of two: 127 becomes 64."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    if convert.__module__ != interpreter.__name__:
        return  # by an earlier call

    def converted(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(numbers, source, target, rounding)
        return torch.from_numpy(numbers.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = converted


def _has_compiled(module: str) -> bool:
    from triton.runtime.jit import JITFunction

    return any(isinstance(member, JITFunction) for member in vars(sys.modules[module]).values())
