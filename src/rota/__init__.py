"""Rota serves many LoRA fine-tunes of one base model, and every adapter gets its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rota.core.version import __version__

if TYPE_CHECKING:
    from rota.core.request import SamplingParams
    from rota.llm.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import rota.sim` must not pull in torch.
    if name == "LLM":
        from rota.llm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from rota.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'rota' has no attribute {name!r}")
