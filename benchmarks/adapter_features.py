"""What DoRA and factors of the head cost a decode step on a CPU, against plain LoRA of the same rank.

    OMP_WAIT_POLICY=passive python benchmarks/adapter_features.py [--rounds 5] [--output FILE]

Eight answers of the built-in model at a time, each with an adapter of rank 16 on all matrices of the layers: plain, the
same as a DoRA, the same with factors of the head. Each kind has an engine of its own, so plain LoRA runs as it does in
a server that knows no others. Rounds alternate between the kinds, because such machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rota import LLM, SamplingParams
from rota.engine.families.table import read_spec
from rota.engine.folders.builtin import builtin_model_folder
from rota.engine.model.sites import module_name, site_shapes
from rota.engine.model.spec import ModelSpec

RANK, ROWS, NEW_TOKENS = 16, 8, 48
KINDS: dict[str, dict[str, Any]] = {"LoRA": {}, "DoRA": {"use_dora": True}, "LoRA with the head": {"head": True}}


def write_adapter(folder: Path, spec: ModelSpec, use_dora: bool = False, head: bool = False) -> Path:
    """A random adapter as PEFT would save it."""
    tensors: dict[str, Tensor] = {}

    def add(module: str, inputs: int, outputs: int) -> None:
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs) * inputs**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.01
        if use_dora:
            tensors[f"{name}.lora_magnitude_vector"] = torch.rand(outputs) + 0.5

    targets = []
    for shape in site_shapes(spec):
        for part, outputs in shape.parts:
            targets.append(part)
            for layer in range(spec.layers):
                add(module_name(layer, part), shape.inputs, outputs)
    if head:
        targets.append("lm_head")
        add("lm_head", spec.hidden_size, spec.vocab_size)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "use_dora": use_dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def step_ms(llm: LLM) -> float:
    """Milliseconds of a decode step: what more tokens take, so that prompts do not count."""
    prompts = [[100 + row, 200, 300 + row] for row in range(ROWS)]

    def seconds(tokens: int) -> float:
        begun = time.perf_counter()
        asked = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        llm.generate(prompts, asked, adapter=["it"] * ROWS)
        return time.perf_counter() - begun

    few = seconds(4)
    return (seconds(4 + NEW_TOKENS) - few) / NEW_TOKENS * 1e3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--output", type=Path)
    asked = options.parse_args()
    folder = builtin_model_folder(quiet=True)
    measured: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as place:
        llms = {}
        for number, (kind, fields) in enumerate(KINDS.items()):
            path = write_adapter(Path(place) / str(number), read_spec(folder), **fields)
            llms[kind] = LLM(str(folder), adapters={"it": path}, quiet=True, device="cpu", max_running_requests=ROWS)
            step_ms(llms[kind])  # the first time is longer than all others
        for _ in range(asked.rounds):
            for kind, llm in llms.items():
                measured[kind].append(step_ms(llm))
    plain = statistics.median(measured["LoRA"])
    rows = {
        kind: {
            "median_ms": round(statistics.median(times), 2),
            "ms": [round(one, 2) for one in times],
            "more_than_lora": round(statistics.median(times) / plain - 1, 3),
        }
        for kind, times in measured.items()
    }
    told = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "rank": RANK,
        "rows": ROWS,
        "kinds": rows,
    }
    print(json.dumps(told, indent=1))
    if asked.output:
        asked.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
