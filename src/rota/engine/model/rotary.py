"""The rotary table holds the cosine and sine of every position's angles, scaled as in the model's training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile

ROTARY_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Frequencies theta^(-2i/head_dim), and how they are scaled for a context longer than the original.

    llama3 and yarn treat a frequency by its turns within the original context. With at least `most_turns` it stays.
    With at most `fewest_turns` it is divided by `factor`. Frequencies between are blended.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    fewest_turns: float = 1.0
    most_turns: float = 4.0
    # Yarn only: whether the blend begins and ends at whole dimensions, and the factor of cosines and sines.
    is_truncated: bool = True
    attention_factor: float = 1.0


def read_rotary(config: ConfigFile) -> RotarySpec:
    """Reads both spellings: `rope_theta` beside `rope_scaling`, and transformers 5's `rope_parameters`."""
    values = config.section("rope_parameters") or config.section("rope_scaling")
    scaling = ConfigFile(config.path, values)
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"{config.path} has rotary parameters per kind of layer; Rota needs one set for all layers.")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROTARY_KINDS:
        raise ModelError(
            f"{config.path} asks for rope scaling '{kind}', which Rota does not have; it has {', '.join(ROTARY_KINDS)}."
        )
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{config.path} rotates only part of each head (partial_rotary_factor); Rota rotates all.")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    # Dynamic scaling begins beyond max_position_embeddings, and the context ends there.
    if kind in ("default", "dynamic"):
        return RotarySpec(theta)
    longest = config.whole("max_position_embeddings")
    original = config.whole(
        "original_max_position_embeddings", scaling.whole("original_max_position_embeddings", longest)
    )
    if kind == "linear":
        return RotarySpec(theta, "linear", scaling.number("factor"))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise ModelError(f"{config.path}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g}).")
        return RotarySpec(theta, "llama3", scaling.number("factor"), original, fewest_turns=low, most_turns=high)
    factor = scaling.number("factor", longest / original)
    attention_factor = yarn_attention_factor(factor)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = yarn_attention_factor(factor, scaling.number("mscale"))
        attention_factor /= yarn_attention_factor(factor, scaling.number("mscale_all_dim"))
    return RotarySpec(
        theta,
        "yarn",
        factor,
        original,
        fewest_turns=scaling.number("beta_slow", 1.0),
        most_turns=scaling.number("beta_fast", 32.0),
        is_truncated=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor", attention_factor),
    )


def rotary_table(rotary: RotarySpec, head_dim: int, positions: int, device: torch.device | str = "cpu") -> Tensor:
    """[positions, head_dim] float32: cosines of head_dim / 2 angles, then their sines."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _frequencies(rotary, head_dim))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return table.mul_(rotary.attention_factor).to(device)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Yarn's factor of cosines and sines for a context scaled by `factor`, if the folder does not give one."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _frequencies(rotary: RotarySpec, head_dim: int) -> Tensor:
    plain = 1.0 / rotary.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rotary.kind == "default":
        return plain
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "llama3":
        turns = rotary.original_context * plain / (2 * math.pi)
        kept = (turns - rotary.fewest_turns) / (rotary.most_turns - rotary.fewest_turns)
    else:
        kept = _yarn_kept(rotary, head_dim)
    kept = kept.clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rotary.factor


def _yarn_kept(rotary: RotarySpec, head_dim: int) -> Tensor:
    """Yarn blends over dimensions, not turns: [highest frequency … first | blend | last … lowest frequency]."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rotary.original_context / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first, last = dimension(rotary.most_turns), dimension(rotary.fewest_turns)
    if rotary.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001  # an empty blend is a step
    return 1.0 - (torch.arange(head_dim // 2, dtype=torch.float32) - first) / width
