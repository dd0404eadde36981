"""Measures what FP8 weights change: the built-in model in eight-bit floats against its own weights.

    python benchmarks/quantised_quality.py [--pieces 16] [--prompts 20] [--logits] [--output FILE]

Texts are the lessons of the built-in adapters, in pieces of 256 tokens: how far the log-probabilities of the likeliest
tokens move, and how often the likeliest token stays. Then every adapter takes its own examination, in both forms. On a
CPU the products are the references, which round weights and activations as a GPU does; few rows, whose activations a
GPU need not round, are rounded too. Weights are also compared one by one, and with those that a folder in blocks means.
`--logits` compares whole logits instead, by transformers with weights and activations rounded in the same way.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.builtin_adapters.styles import LESSONS, STYLES
from rota import LLM, SamplingParams
from rota.core.config import EngineConfig
from rota.core.plan import TokenLogprobs
from rota.engine.build import build_engine
from rota.engine.choices import choose
from rota.engine.engine import Engine
from rota.engine.folders.builtin import CALLER, builtin_adapters, builtin_model_folder
from rota.engine.model.linear import Projection, projection
from rota.engine.quantised.maker import Parts
from rota.engine.quantised.products import in_eight_bit_floats, rounded_rows
from rota.engine.weights.makers import EightBitFloats
from rota.text.tokenizer import Tokenizer

PIECE, LIKELIEST, BLOCK = 256, 20, 128
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64)
SCORED = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=LIKELIEST)


OWN, WEIGHTS, BOTH = "own weights", "FP8 weights", "FP8 weights and activations"


class RoundedWeights(EightBitFloats):
    """The weights of eight-bit floats, by activations as they are."""

    def site(self, parts: Parts) -> Projection:
        weight = parts.weight()
        return projection(in_eight_bit_floats(weight).weights().to(weight.dtype), parts.bias)


# A GPU multiplies few rows as they are and rounds the others, so that it has no form between.
FORMS = {"cpu": {OWN: None, WEIGHTS: RoundedWeights(), BOTH: EightBitFloats()}, "cuda": {OWN: None, BOTH: None}}


def model(device: str, form: str) -> LLM:
    """In the precision that a GPU would use for activations, or in float32 on a CPU."""
    options: dict[str, Any] = {"quiet": True, "device": device, "max_lora_rank": 8, "max_loras_per_batch": 6}
    if device == "cuda":
        return LLM(**options, quantization="fp8" if form == BOTH else "none")

    def build(config: EngineConfig) -> Engine:
        return build_engine(config, choices=replace(choose(config), maker=FORMS[device][form]))

    with mock.patch("rota.llm.llm.build_device", build):
        return LLM(**options, dtype="float32", quantization="none")


def pieces(count: int) -> list[tuple[int, ...]]:
    text = "\n\n".join(str(value) for lesson in LESSONS for value in lesson.values() if isinstance(value, str))
    tokens = Tokenizer(builtin_model_folder(quiet=True)).encode(text)
    return [tokens[start : start + PIECE] for start in range(0, len(tokens) - PIECE, PIECE)][:count]


def scores(llm: LLM, texts: list[tuple[int, ...]]) -> list[TokenLogprobs]:
    return [one for answer in llm.generate(texts, SCORED) for one in answer.prompt_logprobs]


def marks(llm: LLM, prompts: int) -> dict[str, float]:
    """The share of so many prompts on which each adapter's check holds, all asked at once."""
    names = sorted(set(builtin_adapters()) - {CALLER})
    asked = [
        (name, prompt) for prompt_of in range(prompts) for name in names for prompt in [STYLES[name].held[prompt_of]]
    ]
    talks = [[{"role": "user", "content": prompt}] for _, prompt in asked]
    answers = llm.chat(talks, GREEDY, adapter=[name for name, _ in asked])
    held = [(name, STYLES[name].check(prompt, one.text)) for (name, prompt), one in zip(asked, answers, strict=True)]
    return {name: sum(is_held for other, is_held in held if other == name) / prompts for name in names}


def difference(own: list[TokenLogprobs], other: list[TokenLogprobs]) -> dict[str, float]:
    """Of log-probabilities in nats, over tokens that are among the likeliest of both."""
    moved = [
        abs(logprob - there[token])
        for before, after in zip(own, other, strict=True)
        for there in [dict(after.top)]
        for token, logprob in before.top
        if token in there
    ]
    is_same = [before.top[0][0] == after.top[0][0] for before, after in zip(own, other, strict=True)]
    is_sure = [before.top[0][1] - before.top[1][1] > 0.5 for before in own]
    sure = [same for same, is_clear in zip(is_same, is_sure, strict=True) if is_clear]
    return {
        "tokens": len(own),
        "mean |change of log-probability|": round(statistics.fmean(moved), 4),
        "99th percentile": round(statistics.quantiles(moved, n=100)[98], 4),
        "likeliest token is the same": round(statistics.fmean(is_same), 4),
        "... where it led by 0.5 nats": round(statistics.fmean(sure), 4),
        "perplexity of own weights": round(math.exp(-statistics.fmean(one.chosen for one in own)), 4),
        "perplexity": round(math.exp(-statistics.fmean(one.chosen for one in other)), 4),
    }


@torch.inference_mode()
def logit_errors(texts: list[tuple[int, ...]]) -> dict[str, float]:
    """The norm of what rounding changes in all logits, by the norm of the logits."""
    tokens = torch.tensor(texts)
    network = AutoModelForCausalLM.from_pretrained(builtin_model_folder(quiet=True), dtype=torch.float32)
    found = {OWN: network(tokens).logits}
    layers = [module for name, module in network.named_modules() if name.endswith("proj")]
    for layer in layers:
        layer.weight.copy_(in_eight_bit_floats(layer.weight).weights())
    found[WEIGHTS] = network(tokens).logits
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, x: (rounded_rows(x[0].flatten(0, 1)).weights().view_as(x[0]),))
    found[BOTH] = network(tokens).logits
    own = found.pop(OWN)
    return {form: round(float((logits - own).norm() / own.norm()), 5) for form, logits in found.items()}


def in_blocks(weight: Tensor) -> Tensor:
    """What a folder with a scale for each block of 128 x 128 means."""
    rounded = torch.empty_like(weight)
    for rows, target in zip(weight.split(BLOCK), rounded.split(BLOCK), strict=True):
        for block, place in zip(rows.split(BLOCK, 1), target.split(BLOCK, 1), strict=True):
            scale = block.abs().max() / 448
            place.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return rounded


def weight_errors() -> dict[str, float]:
    """The norm of what rounding changes, by the norm of the weights: medians over the layers' matrices."""
    found: dict[str, list[float]] = {"one scale for each output": [], "blocks": [], "blocks, then each output": []}
    for weight in matrices():
        blocks = in_blocks(weight)
        twice = in_eight_bit_floats(blocks).weights()
        rounded = (in_eight_bit_floats(weight).weights(), blocks, twice)
        for errors, one in zip(found.values(), rounded, strict=True):
            errors.append(float((one - weight).norm() / weight.norm()))
    return {name: round(statistics.median(errors), 5) for name, errors in found.items()}


def matrices() -> Iterator[Tensor]:
    with safe_open(builtin_model_folder(quiet=True) / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no mapping)
            if name.endswith("proj.weight"):
                yield file.get_tensor(name).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pieces", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=20, help="of each adapter's examination, 50 at most")
    parser.add_argument("--logits", action="store_true", help="only whole logits, on the CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    texts = pieces(arguments.pieces)
    report = {"logits": logit_errors(texts)} if arguments.logits else compare(arguments, texts)
    report = {"machine": platform.machine(), "torch": torch.__version__, **report}
    print(json.dumps(report, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def compare(arguments: argparse.Namespace, texts: list[tuple[int, ...]]) -> dict[str, Any]:
    found, seconds = {}, {}
    for form in FORMS[arguments.device]:
        started_at = time.perf_counter()
        llm = model(arguments.device, form)
        found[form] = scores(llm, texts), marks(llm, arguments.prompts)
        seconds[form] = round(time.perf_counter() - started_at, 1)
        print(form, found[form][1], f"{seconds[form]} s", flush=True)
    return {
        "texts": {form: difference(found[OWN][0], one) for form, (one, _) in found.items() if form != OWN},
        "adapters pass their checks": {form: one for form, (_, one) in found.items()},
        "prompts for each adapter": arguments.prompts,
        "weights": weight_errors(),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
