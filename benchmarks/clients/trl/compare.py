"""Asks a live server for answers of adapters, and PEFT for the log-probabilities of the same tokens.

python benchmarks/clients/trl/compare.py URL MODEL ADAPTER=FOLDER …    one line of JSON for each adapter

Each adapter's answer is scored with the weights of every folder: only those of its own folder may give what the
server says.
"""

from __future__ import annotations

import json
import sys

import requests
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "tell me a story?"


def ask(url: str, adapter: str, prompt: list[int]) -> tuple[str, list[int], list[float]]:
    """As TRL asks: an answer's text, its tokens, and the log-probability of each."""
    body = {"model": adapter, "prompt": prompt, "max_tokens": 24, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
            "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 2**62 + 1}  # fmt: skip
    choice = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    return choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"]


def scores(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def main() -> None:
    url, model, *named = sys.argv[1:]
    folders = dict(one.split("=", 1) for one in named)
    prompt = AutoTokenizer.from_pretrained(model)(PROMPT)["input_ids"]
    tuned = {
        adapter: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder)
        for adapter, folder in folders.items()
    }
    for adapter in folders:
        text, tokens, said = ask(url, adapter, prompt)
        off = {
            other: (scores(one, prompt, tokens) - torch.tensor(said)).abs().max().item() for other, one in tuned.items()
        }
        print(json.dumps({"adapter": adapter, "answer": text, "largest difference to PEFT with the weights of": off}))


if __name__ == "__main__":
    main()
