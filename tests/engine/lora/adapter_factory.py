"""Adapters of tiny models, saved by PEFT itself, and ways to spoil them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rota.engine.lora.files.folder import CONFIG, SINGLE

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


# The files of adapters that were made before: tests of one model begin with the same few.
_MADE: WeakKeyDictionary[PreTrainedModel, dict[str, dict[str, bytes]]] = WeakKeyDictionary()


def make_adapter(folder: Path, model: PreTrainedModel, seed: int = 0, **fields: Any) -> Path:
    """Save a random adapter of `model` into `folder`, of rank 4 on everything; `fields` are LoraConfig's."""
    made, kind = _MADE.setdefault(model, {}), f"{seed} {fields}"
    if kind not in made:
        _save(folder, model, seed, fields)
        made[kind] = {name: (folder / name).read_bytes() for name in (CONFIG, SINGLE)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made[kind].items():
        (folder / name).write_bytes(content)
    return folder


def _save(folder: Path, model: PreTrainedModel, seed: int, fields: dict[str, Any]) -> None:
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": EVERYTHING, "task_type": "CAUSAL_LM", **fields}
        | {"init_lora_weights": False}
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        tuned = get_peft_model(copy.deepcopy(model), config)
        for name, parameter in tuned.named_parameters():
            # What starts as the model's own, or at nought, would not show: magnitudes and biases.
            if parameter.requires_grad and ".lora_A." not in name and ".lora_B.default.weight" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        tuned.save_pretrained(str(folder))
    # A saved adapter has forgotten that its factors were drawn at random.
    change_config(folder, init_lora_weights=fields.get("init_lora_weights", True))


def load_with_peft(folder: Path, model: PreTrainedModel) -> PeftModel:
    """The adapter as PEFT would serve it."""
    return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def change_config(folder: Path, **fields: Any) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, **fields}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)


def change_dtype(folder: Path, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: each.to(dtype) for name, each in tensors.items()}))


def greedy_answer(model: PreTrainedModel | PeftModel, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """What transformers answers, without an end before all new tokens are there."""
    tokens = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    made = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return list(made[0, len(prompt) :].tolist())
