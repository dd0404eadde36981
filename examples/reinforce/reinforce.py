"""Reinforce one behaviour of a running server's adapter: python examples/reinforce/reinforce.py [URL [STEPS [RATE]]]"""

import json
import sys

import httpx
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME, PROMPT, ASKED = "vowels", "tell me a story?", {"n": 16, "max_tokens": 16, "return_token_ids": True}


def reward(text: str) -> float:
    """The behaviour: the share of an answer's characters that are vowels."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def publish(client: httpx.Client, model: PeftModel) -> int:
    """Give the name its next version; answers come from it when this call has ended."""
    query = {"config": json.dumps(model.peft_config["default"].to_dict(), default=list)}
    body, kind = save(get_peft_model_state_dict(model)), {"Content-Type": "application/octet-stream"}
    return int(client.put(f"/v1/adapters/{NAME}", params=query, content=body, headers=kind).json()["version"])


def negative_log_likelihood(model: PeftModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")


def main(url: str = "http://127.0.0.1:30000", steps: str = "40", rate: str = "1e-3") -> None:
    client = httpx.Client(base_url=url, timeout=300.0)
    folder = client.get("/model_info").json()["model_path"]
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(rate))
    for version in (publish(client, model) for _ in range(int(steps))):
        choices = client.post("/v1/completions", json={"model": NAME, "prompt": prompt, **ASKED}).json()["choices"]
        rewards = torch.tensor([reward(choice["text"]) for choice in choices])
        print(f"{NAME}@{version}: reward {rewards.mean():.2f}, for example {choices[0]['text']!r}", flush=True)
        for choice, gain in zip(choices, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True):
            (gain * negative_log_likelihood(model, prompt, choice["token_ids"]) / len(choices)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
