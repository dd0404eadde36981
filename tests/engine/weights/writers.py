"""Folders in few bits, written number by number as the formats' documents say, from a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.model_factory import make_tiny_model

GROUP = 32
SINGLE = "model.safetensors"
Tensors = dict[str, Tensor]
# A matrix's stored tensors by suffix, and the weights they mean.
Stored = tuple[Tensors, Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """A layout: what config.json says of it, and how a matrix is stored."""

    section: dict[str, Any]
    store: Callable[[Tensor], Stored]


def write_model(folder: Path, layout: str, family: str = "llama2", left_out: tuple[str, ...] = ()) -> PreTrainedModel:
    """A tiny model in this layout; what is returned has the weights that the folder's tensors mean."""
    written = LAYOUTS[layout]
    model = make_tiny_model(folder, family, intermediate_size=128)
    tensors, meant = load_file(folder / SINGLE), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        module = name.removesuffix(".weight")
        if module not in left_out:
            parts, meant[name] = written.store(tensors.pop(name))
            tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    change_config(folder, quantization_config={**written.section, **_left_out(written.section, left_out)})
    model.load_state_dict(meant, strict=False)
    return model


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_section(folder: Path, **fields: Any) -> None:
    """Replace fields of the section `quantization_config`."""
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    change_config(folder, quantization_config={**section, **fields})


def _left_out(section: dict[str, Any], modules: tuple[str, ...]) -> dict[str, Any]:
    field = "ignore" if section["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    return {field: ["lm_head", *modules]}


def float8(weight: Tensor, scales: Tensor) -> Stored:
    codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes}, codes.float() * scales


def one_scale(weight: Tensor, **more: Tensor) -> Stored:
    scale = weight.abs().max() / 448
    tensors, meant = float8(weight, scale)
    return {**tensors, "weight_scale": scale, **more}, meant


def scale_by_output(weight: Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    tensors, meant = float8(weight, scales.float())
    return {**tensors, "weight_scale": scales}, meant


def scale_by_block(weight: Tensor, suffix: str, size: int = 48) -> Stored:
    """48 divides no side of the matrices, so that the last blocks are smaller."""
    rows, columns = (-(-side // size) for side in weight.shape)
    scales, spread = torch.zeros(rows, columns), torch.zeros_like(weight)
    for row in range(rows):
        for column in range(columns):
            block = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
            scales[row, column] = spread[block] = weight[block].abs().max() / 448
    tensors, meant = float8(weight, spread)
    return {**tensors, suffix: scales}, meant


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Nibbles:
    """A matrix in four bits, before it is packed."""

    codes: Tensor  # [outputs, inputs]
    scales: Tensor  # [outputs, groups]
    zeros: Tensor  # [outputs, groups], 1 … 15
    groups: Tensor  # [inputs]

    @property
    def meant(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def nibbles(weight: Tensor, is_symmetric: bool, is_reordered: bool = False, group: int = GROUP) -> Nibbles:
    outputs, inputs = weight.shape
    groups = torch.arange(inputs) // group
    if is_reordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    scales, zeros = torch.ones(outputs, int(groups.max()) + 1), torch.full((outputs, int(groups.max()) + 1), 8.0)
    for number in range(scales.shape[1]):
        some = weight[:, groups == number]
        if is_symmetric:
            scales[:, number] = (some.abs().amax(1) / 7).half()
        else:
            scales[:, number] = ((some.amax(1) - some.amin(1)) / 14).half()
            zeros[:, number] = (-some.amin(1) / scales[:, number]).round().clamp(1, 15)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    return Nibbles(codes=codes, scales=scales, zeros=zeros, groups=groups)


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, 8 m] -> [n, m] int32: nibble i of a word, from the lowest, is number order[i] of its eight."""
    eights = numbers.long().view(len(numbers), -1, 8)
    packed = sum(eights[:, :, order[nibble]] << (4 * nibble) for nibble in range(8))
    return torch.as_tensor(packed).to(torch.uint32).view(torch.int32)


def awq(weight: Tensor, group: int = GROUP) -> Stored:
    made, order = nibbles(weight, is_symmetric=False, group=group), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(made.codes.T.contiguous(), order),
        "qzeros": words(made.zeros.T.contiguous(), order),
        "scales": made.scales.T.half(),
    }
    return tensors, made.meant


def gptq(weight: Tensor, is_symmetric: bool = False, is_reordered: bool = False, lowered: int = 1) -> Stored:
    made = nibbles(weight, is_symmetric, is_reordered)
    tensors = {
        "qweight": words(made.codes).T,
        "qzeros": words(made.zeros.T.contiguous() - lowered),
        "scales": made.scales.T.half(),
        "g_idx": made.groups.int(),
    }
    return tensors, made.meant


def packed(weight: Tensor, is_symmetric: bool = True, is_reordered: bool = False, group: int = GROUP) -> Stored:
    made = nibbles(weight, is_symmetric, is_reordered, group)
    tensors = {
        "weight_packed": words(made.codes),
        "weight_scale": made.scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    tensors |= {} if is_symmetric else {"weight_zero_point": words(made.zeros.T.contiguous()).T}
    tensors |= {"weight_g_idx": made.groups.int()} if is_reordered else {}
    return tensors, made.meant


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme},
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def floats(strategy: str, is_dynamic: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    rounding = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": is_dynamic}
    return compressed("float-quantized", weights, rounding)


def ints(**more: Any) -> dict[str, Any]:
    return compressed("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, **more})


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}

EIGHT_BITS = {
    "AutoFP8": Written({"quant_method": "fp8", "activation_scheme": "dynamic"}, one_scale),
    "AutoFP8, static": Written(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: one_scale(weight, input_scale=torch.tensor(0.25)),
    ),
    "compressed-tensors, channels": Written(floats("channel"), scale_by_output),
    "compressed-tensors, static": Written(
        floats("tensor", is_dynamic=False), lambda weight: one_scale(weight, input_scale=torch.tensor(0.25))
    ),
    "fine-grained": Written(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 48]},
        lambda weight: scale_by_block(weight, "weight_scale_inv"),
    ),
    "compressed-tensors, blocks": Written(
        floats("block", block_structure=[48, 48]), lambda weight: scale_by_block(weight, "weight_scale")
    ),
}
FOUR_BITS = {
    "AWQ": Written(AWQ, awq),
    "AWQ, one group": Written({**AWQ, "group_size": -1}, lambda weight: awq(weight, weight.shape[1])),
    "GPTQ": Written(GPTQ, gptq),
    "GPTQ, symmetric": Written({**GPTQ, "sym": True}, lambda weight: gptq(weight, is_symmetric=True)),
    "GPTQ, by importance": Written({**GPTQ, "desc_act": True}, lambda weight: gptq(weight, is_reordered=True)),
    "GPTQ, second version": Written({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, lowered=0)),
    "compressed-tensors": Written(ints(), packed),
    "compressed-tensors, with zeros": Written(ints(symmetric=False), lambda weight: packed(weight, is_symmetric=False)),
    "compressed-tensors, by importance": Written(
        ints(actorder="group"), lambda weight: packed(weight, is_reordered=True)
    ),
    "compressed-tensors, channels": Written(
        ints(group_size=None, strategy="channel"), lambda weight: packed(weight, group=weight.shape[1])
    ),
}
EIGHT, FOUR = (tuple(f"{bits}: {name}" for name in made) for bits, made in ((8, EIGHT_BITS), (4, FOUR_BITS)))
LAYOUTS = dict(zip((*EIGHT, *FOUR), (*EIGHT_BITS.values(), *FOUR_BITS.values()), strict=True))
IN_BLOCKS = ("8: fine-grained", "8: compressed-tensors, blocks")
REORDERED = ("4: GPTQ, by importance", "4: compressed-tensors, by importance")
