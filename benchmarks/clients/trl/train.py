"""TRL's AsyncGRPOTrainer, unchanged, trains an adapter of a live server's model to say vowels.

python benchmarks/clients/trl/train.py --base-url URL --model FOLDER --folder OUTPUT [--steps N] [--output FILE]

FOLDER is the model that the server serves. The server must be able to read OUTPUT, where the adapters are written.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    # TRL attends by a kernel for GPUs. Here the same is computed on a CPU; `kernels` takes it from this folder.
    os.environ["LOCAL_KERNELS"] = f"kernels-community/flash-attn3={Path(__file__).parent / 'flash-attn3'}"
    # TRL looks up how fast its GPU is, and goes on without one that it does not know.
    torch.cuda.get_device_name = lambda _device=None: "no GPU"

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

PROMPTS = ["say a word", "what is a bird", "who sings", "name a river", "where is the sea", "why do cats sleep"]
# Of some eighty figures that the trainer logs.
KEPT = (
    "reward",
    "ratio",
    "kl",
    "sample/staleness_mean",
    "perf/step_s",
    "perf/weight_sync_s",
    "perf/weight_sync_pause_s",
)


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """The share of an answer's characters that are vowels."""
    texts = [one[-1]["content"] for one in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]


class Record(TrainerCallback):
    """Keeps what the trainer logs."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            kept = {name: round(logs[name], 4) for name in KEPT if name in logs}
            self.lines.append({"step": state.global_step, **kept})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--output", type=Path, help="what was logged, as JSON")
    options = parser.parse_args()
    record = Record()
    trainer = AsyncGRPOTrainer(
        model=options.model,
        reward_funcs=vowels,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": one}] for one in PROMPTS * 200]}),
        peft_config=LoraConfig(r=8, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[record],
        args=AsyncGRPOConfig(
            output_dir=str(options.folder),
            vllm_server_base_url=options.base_url,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            num_generations=8,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=1,
            max_completion_length=16,
            token_budget=1024,
            max_staleness=2,
            dtype="float32",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
        ),
    )
    trainer.train()
    if options.output:
        options.output.write_text(json.dumps(record.lines))


if __name__ == "__main__":
    main()
