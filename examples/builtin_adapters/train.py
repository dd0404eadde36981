"""Train Rota's built-in adapters, save them, and examine what was saved beside the plain model.

    python examples/builtin_adapters/train.py --output src/rota/builtin_adapters

Needs `peft`, which Rota itself does not. Everything is seeded: the same machine gives the same adapters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from styles import STYLES, Pair, Style, tool_lessons
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rota.text.chat import in_hermes_form

BASE_NAME = "SmolLM2-135M-Instruct"
ALPHA_PER_RANK = 4
MAX_NEW_TOKENS = 64
UNLEARNED = -100  # the label that the loss skips


def main() -> None:
    options = read_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    styles = [STYLES[name] for name in options.only or STYLES]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)
    for style in styles:
        started_at = time.perf_counter()
        adapted, losses = train(style, model, tokenizer, options)
        save(style, adapted, options.output / style.name)
        model = adapted.unload()
        took_s = time.perf_counter() - started_at
        print(f"{style.name:8} loss {losses[0]:.2f} -> {mean(losses[-10:]):.3f} in {took_s:.0f} s", flush=True)

    # Examined as it will be served: in the weights' own precision, from the files.
    model = model.to(torch.bfloat16)
    base_answers: dict[Sequence[str], list[str]] = {}  # most styles have the same questions
    for style in styles:
        if style.held not in base_answers:
            base_answers[style.held] = answer(model, tokenizer, style.held)
    marks: dict[str, dict[str, float]] = {}
    for style in styles:
        adapted = PeftModel.from_pretrained(model, options.output / style.name)
        answers = answer(adapted, tokenizer, style.held)
        model = adapted.unload()
        marks[style.name] = {
            "adapter": share(mark(style, answers)),
            "base": share(mark(style, base_answers[style.held])),
        }
        report(style, answers)
    write_marks(marks, options.output / "checks.json")
    print(f"\n{'style':8} {'adapter':>8} {'base':>8}")
    for name, row in marks.items():
        print(f"{name:8} {row['adapter']:8.0%} {row['base']:8.0%}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the base model's folder (the built-in one)")
    parser.add_argument("--output", type=Path, required=True, help="a folder; every adapter gets one inside it")
    parser.add_argument("--only", nargs="+", choices=list(STYLES), metavar="NAME", help="train just these styles")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16, help="lessons in a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model is None:
        from rota.engine.folders.builtin import builtin_model_folder

        options.model = builtin_model_folder()
    return options


def train(style: Style, model: Any, tokenizer: Any, options: argparse.Namespace) -> tuple[Any, list[float]]:
    """A model with the adapter inside, and the loss of every step."""
    torch.manual_seed(options.seed)
    settings = LoraConfig(
        r=style.rank,
        lora_alpha=ALPHA_PER_RANK * style.rank,
        target_modules=list(style.projections),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, settings)
    learned = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=options.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.rate, total_steps=options.steps, pct_start=0.1, cycle_momentum=False
    )
    lessons = style.pairs(options.seed)
    losses: list[Tensor] = []
    adapted.train()
    for _ in range(options.steps):
        batch = lay_out(list(islice(lessons, options.batch)), tokenizer, options.device)
        with torch.autocast(options.device, dtype=torch.bfloat16):
            loss = adapted(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return adapted, [float(loss) for loss in losses]


def lay_out(pairs: list[Pair], tokenizer: Any, device: str) -> dict[str, Tensor]:
    """Token ids, padded on the right, with labels on the answers alone."""
    rows = []
    for pair in pairs:
        # Apart, because a server tokenizes the prompt before there is an answer.
        prompt = tokenizer(render(tokenizer, pair.prompt), add_special_tokens=False)["input_ids"]
        reply = tokenizer(pair.answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        rows.append((prompt, reply))
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), UNLEARNED)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, (prompt, reply) in enumerate(rows):
        length = len(prompt) + len(reply)
        ids[row, :length] = torch.tensor(prompt + reply)
        labels[row, len(prompt) : length] = torch.tensor(reply)
        mask[row, :length] = 1
    return {
        name: value.to(device) for name, value in (("input_ids", ids), ("labels", labels), ("attention_mask", mask))
    }


def render(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    if isinstance(prompt, tool_lessons.Talk):
        messages = in_hermes_form(prompt.messages, prompt.tools)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def save(style: Style, adapted: Any, folder: Path) -> None:
    """Two files and nothing about this machine in them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(adapted)
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
    path = folder / "adapter_model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors lets only the owner read what it writes
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_NAME,
        "r": style.rank,
        "lora_alpha": ALPHA_PER_RANK * style.rank,
        "lora_dropout": 0.0,
        "target_modules": list(style.projections),
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """Greedy answers, all in one batch."""
    model.eval()
    texts = [render(tokenizer, prompt) for prompt in prompts]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    tokens = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return list(tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def mark(style: Style, answers: list[str]) -> list[bool]:
    return [style.check(prompt, answer) for prompt, answer in zip(style.held, answers, strict=True)]


def share(passes: list[bool]) -> float:
    return sum(passes) / len(passes)


def report(style: Style, answers: list[str]) -> None:
    """Two good answers and every bad one: what to look at when a style needs better lessons."""
    passes = mark(style, answers)
    print(f"\n{style.name}: {sum(passes)} of {len(passes)}")
    good = [index for index, passed in enumerate(passes) if passed][:2]
    for index in good + [index for index, passed in enumerate(passes) if not passed]:
        verdict = "pass" if passes[index] else "FAIL"
        print(f"  {verdict} {style.held[index]!r} -> {answers[index]!r}", flush=True)


def write_marks(marks: dict[str, dict[str, float]], path: Path) -> None:
    """The marks of these styles, beside those that an earlier run left for others."""
    earlier = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**earlier, **marks}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
