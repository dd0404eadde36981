"""Assets are what a server is started on: a random model in Hugging Face format, and random PEFT adapters.

    python -m benchmarks.h200.assets FOLDER SHAPE [--dummy]

A script of its own, so that the process that measures holds no memory of the device.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from rota.engine.families.table import read_spec
from rota.engine.model.sites import module_name, site_shapes

from .shapes import ADAPTERS, RANK, SHAPES, Shape

SHARD_BYTES = 2 << 30
COMPLETE, PARTIAL = "complete", "complete but for weights"


def make_assets(folder: Path, shape: Shape, has_weights: bool = True) -> None:
    """A model in FOLDER/model, adapters in FOLDER/adapter1 and on, and in FOLDER/machine what made them."""
    if is_made(folder, has_weights):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(folder / "model", shape.config)
    write_tokenizer(model, shape.config["vocab_size"])
    if has_weights:
        write_weights(model, shape.config, device)
    for number in range(1, ADAPTERS + 1):
        make_adapter(folder / f"adapter{number}", model, RANK, device)
    words = f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}"
    (folder / "machine").write_text(words, "utf-8")
    (folder / (COMPLETE if has_weights else PARTIAL)).touch()


def is_made(folder: Path, has_weights: bool) -> bool:
    """Whether an earlier call has completed a folder that will do."""
    return (folder / COMPLETE).exists() or (not has_weights and (folder / PARTIAL).exists())


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder that `--load-format dummy` can be started on."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Every token is a word of its own, so each of a random model's tokens is text that a stream must send."""
    words = {f"w{token}": token for token in range(vocabulary)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def write_weights(folder: Path, config: dict[str, Any], device: str) -> None:
    """Random safetensors in shards; the deviation is `dummy_weights`', so that activations stay in range."""
    dtype = getattr(torch, config["torch_dtype"])
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes: dict[int, int] = defaultdict(int)
    places: dict[str, str] = {}

    def flush() -> None:
        save_file(shards[-1], folder / f"model-{len(shards):05d}.safetensors")
        places.update(dict.fromkeys(shards[-1], f"model-{len(shards):05d}.safetensors"))
        shards[-1] = {}

    for name, shape in weight_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        tensor = tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, shape[-1] ** -0.5)
        shards[-1][name] = tensor.cpu()
        sizes[len(shards)] += tensor.nbytes
        if sizes[len(shards)] >= SHARD_BYTES:
            flush()
            shards.append({})
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama by the name transformers gives it."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def make_adapter(
    folder: Path,
    model: Path,
    rank: int,
    device: str = "cpu",
    scale: float = 0.02,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """A random PEFT folder on all seven projections."""
    folder.mkdir()
    spec, tensors = read_spec(model), {}

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, dtype=dtype, device=device) * scale).cpu()

    for layer in range(spec.layers):
        for site in site_shapes(spec):
            for part, width in site.parts:
                name = f"base_model.model.{module_name(layer, part)}"
                tensors[f"{name}.lora_A.weight"] = draw(rank, site.inputs)
                tensors[f"{name}.lora_B.weight"] = draw(width, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [part for site in site_shapes(spec) for part, _ in site.parts]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dummy", action="store_true", help="write no weights: servers draw their own")
    options = parser.parse_args()
    make_assets(options.folder, SHAPES[options.shape], not options.dummy)


if __name__ == "__main__":
    main()
