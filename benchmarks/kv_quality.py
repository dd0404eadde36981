"""Measures what keys and values in eight bits change: the built-in model against itself with a cache of its precision.

    python benchmarks/kv_quality.py [--tokens 384] [--prompts 20] [--output FILE]

Pages, code and lessons are read from the repository. Each text is computed in one step, whose attention reads what it
has just written. Every logit is compared, at every token: how far they move, and how often the likeliest token stays.
Then every built-in adapter takes its own examination, with the cache in both precisions. Weights are the model's own,
in float32, so that nothing else is rounded.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from examples.builtin_adapters.styles import LESSONS, STYLES
from rota import LLM, SamplingParams
from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.engine.build import build_engine
from rota.engine.engine import Engine
from rota.engine.folders.builtin import CALLER, builtin_adapters, builtin_model_folder
from rota.engine.step.device_step import DeviceStep, PrefillPart, int32
from rota.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/architecture.md", "docs/policies.md", "src/rota/runtime/loop.py", "LICENSE")
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64)
CLEAR = 0.5  # nats by which the likeliest token leads the second
Kind = Literal["auto", "fp8"]


def texts() -> dict[str, str]:
    lessons = (str(value) for lesson in LESSONS for value in lesson.values() if isinstance(value, str))
    return {**{name: (ROOT / name).read_text("utf-8") for name in FILES}, "lessons": "\n\n".join(lessons)}


def engine_with(kind: Kind) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(dtype="float32", quantization="none", device="cpu"),
            cache=CacheConfig(kv_blocks=256, kv_cache_dtype=kind),
            scheduler=SchedulerConfig(max_running_requests=1),
            quiet=True,
        )
    )


@torch.inference_mode()
def logits_of(engine: Engine, tokens: tuple[int, ...]) -> Tensor:
    """[tokens, vocabulary], all of them one chunk."""
    length, block_size = len(tokens), engine.capacity.block_size
    step = DeviceStep(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(length),
        addresses=torch.arange(length),
        tables=torch.arange(-(-length // block_size), dtype=torch.int32).expand(2, -1).contiguous(),
        decode_rows=int32([]),
        decode_lengths=int32([]),
        prefill=PrefillPart(int32([0]), int32([0]), int32([0, length]), length, (0,), (0,), (length,)),
    )
    return engine._model.logits(engine._model.forward(step, engine._cache.layers)).float()


def compared(own: Tensor, other: Tensor, tokens: tuple[int, ...]) -> dict[str, float]:
    """Logits count from their mean, since a softmax does not see it."""
    own, other = (logits - logits.mean(1, keepdim=True) for logits in (own, other))
    own_logs, other_logs = own.log_softmax(1), other.log_softmax(1)
    top = own_logs.topk(2, dim=1).values
    is_same, is_clear = own.argmax(1) == other.argmax(1), top[:, 0] - top[:, 1] > CLEAR
    following = torch.tensor(tokens[1:])[:, None]
    return {
        "tokens": len(tokens),
        "logit error, relative": float((other - own).norm() / own.norm()),
        "largest logit error": float((other - own).abs().max()),
        "KL divergence, nats": float((own_logs.exp() * (own_logs - other_logs)).sum(1).mean()),
        "likeliest token is the same": float(is_same.float().mean()),
        "... where it led by 0.5 nats": float(is_same[is_clear].float().mean()),
        "perplexity": float((-own_logs[:-1].gather(1, following).mean()).exp()),
        "perplexity in eight bits": float((-other_logs[:-1].gather(1, following).mean()).exp()),
    }


def compare_texts(length: int) -> dict[str, dict[str, float]]:
    tokenizer = Tokenizer(builtin_model_folder(quiet=True))
    pieces = {name: tokenizer.encode(text)[:length] for name, text in texts().items()}
    engines = engine_with("auto"), engine_with("fp8")
    own, other = ({name: logits_of(engine, piece) for name, piece in pieces.items()} for engine in engines)
    each = {name: compared(own[name], other[name], piece) for name, piece in pieces.items()}
    weights = {name: len(piece) for name, piece in pieces.items()}
    mean = {
        key: sum(each[name][key] * weights[name] for name in pieces) / sum(weights.values())
        for key in each["lessons"]
        if key not in ("tokens", "largest logit error")
    }
    return {**each, "mean": {"tokens": sum(weights.values()), **mean}}


def marks(kind: Kind, prompts: int) -> dict[str, float]:
    """The share of so many prompts on which each adapter's check holds, all asked at once."""
    llm = LLM(quiet=True, device="cpu", dtype="float32", quantization="none", kv_cache_dtype=kind)
    names = sorted(set(builtin_adapters()) - {CALLER})
    asked = [(name, prompt) for name in names for prompt in STYLES[name].held[:prompts]]
    talks = [[{"role": "user", "content": prompt}] for _, prompt in asked]
    answers = llm.chat(talks, GREEDY, adapter=[name for name, _ in asked])
    held = [(name, STYLES[name].check(prompt, one.text)) for (name, prompt), one in zip(asked, answers, strict=True)]
    return {name: sum(is_held for other, is_held in held if other == name) / prompts for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=384, help="of each text")
    parser.add_argument("--prompts", type=int, default=20, help="of each adapter's examination; 0: none")
    parser.add_argument("--output", type=Path, help="write everything as JSON here")
    options = parser.parse_args()
    begun_at = time.monotonic()
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "texts": compare_texts(options.tokens),
    }
    if options.prompts:
        report["adapters"] = {kind: marks(kind, options.prompts) for kind in ("auto", "fp8")}
    report["seconds"] = round(time.monotonic() - begun_at)
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
