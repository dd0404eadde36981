"""On a GPU in bfloat16, in graphs and under rotation, the top token is the reference's wherever that one is sure."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Literal

import pytest
import torch
from peft import PeftModel

from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import PromptsScored
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.engine.build import build_engine
from rota.engine.lora import annex
from rota.runtime.doorbell import Doorbell
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import WINDOWED, make_tiny_model
from tests.worlds import outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

NEW_TOKENS = 48
# Of the spread of a position's logits: bfloat16 keeps 8 bits, and layers add up.
CLEAR_MARGIN = 0.12
# With keys and values in eight bits; on a CPU in float32 these alone gave 0.13 at most.
EIGHT_BITS_MARGIN = 0.3


class GPUServer(Server):
    """The tests' server in bfloat16, with graphs, two slots and short turns."""

    def __init__(self, folder: Path, kv_cache_dtype: Literal["auto", "fp8"] = "auto") -> None:
        self.config = EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="bfloat16", device="cuda"),
            cache=CacheConfig(kv_blocks=512, kv_cache_dtype=kv_cache_dtype),
            scheduler=SchedulerConfig(max_running_requests=16, chunked_prefill_size=32),
            lora=LoraConfig(max_loras_per_batch=2, max_lora_rank=16),
            policy=PolicyConfig(lora_rotation_quantum_ms=5.0, lora_max_stall_ms=10.0),
            quiet=True,
        )
        self.engine = build_engine(self.config)
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()
        self._max_open = 100


def agrees(model: torch.nn.Module, prompt: tuple[int, ...], answer: list[int], margin: float = CLEAR_MARGIN) -> float:
    """Share of positions at which the answer's token is the reference's, or one it holds nearly as likely."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    behind = (logits.max(dim=1).values - chosen) / logits.std(dim=1)
    return float((behind <= margin).float().mean())


@pytest.mark.parametrize("annexes", ["apart", "below the matrices"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "smollm2", "olmo2", "granite", *WINDOWED])
def test_every_token_is_the_references_wherever_that_is_sure(family, annexes, tmp_path, monkeypatch):
    # Any bank is large beside a tiny model's matrices.
    monkeypatch.setattr(annex, "LARGEST_SHARE", 0.0 if annexes == "apart" else 100.0)
    model = make_tiny_model(tmp_path / "model", family)
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    for number in (1, 2, 3):
        make_adapter(tmp_path / str(number), model, seed=number, r=4 * number)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (4, 50, 90)]
    server = GPUServer(tmp_path / "model")
    server.add(*(adapter(number, tmp_path) for number in (1, 2, 3)))
    asked = [
        request(f"{place}-{number}", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(number))
        for place, prompt in enumerate(prompts)
        for number in range(4)
    ]
    given = outputs(server.serve(asked))

    for number in range(4):
        reference = rounded
        if number:
            reference = PeftModel.from_pretrained(copy.deepcopy(rounded), tmp_path / str(number)).eval()
        for place, prompt in enumerate(prompts):
            answer = given[RequestId(f"{place}-{number}")]
            assert len(answer) == NEW_TOKENS
            assert agrees(reference, prompt, answer) == 1.0, f"adapter {number}, prompt {place}"


@pytest.mark.parametrize("family", ["llama3", "mistral, windowed"])
def test_with_keys_and_values_in_eight_bits_every_token_is_nearly_the_reference_s(family, tmp_path):
    """In graphs and outside, with long and short rows, under rotation."""
    model = make_tiny_model(tmp_path / "model", family)
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    for number in (1, 2, 3):
        make_adapter(tmp_path / str(number), model, seed=number, r=4)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (4, 50, 90, 300)]
    server = GPUServer(tmp_path / "model", "fp8")
    server.add(*(adapter(number, tmp_path) for number in (1, 2, 3)))
    asked = [
        request(f"{place}-{place}", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(place))
        for place, prompt in enumerate(prompts)
    ]
    given = outputs(server.serve(asked))

    assert server.engine.capacity.kv_dtype == "float8_e4m3fn"
    for number, prompt in enumerate(prompts):
        reference = rounded
        if number:
            reference = PeftModel.from_pretrained(copy.deepcopy(rounded), tmp_path / str(number)).eval()
        answer = given[RequestId(f"{number}-{number}")]
        assert agrees(reference, prompt, answer, EIGHT_BITS_MARGIN) == 1.0, f"prompt {number}"


def test_a_prompt_s_tokens_are_as_likely_as_the_reference_says_beside_steps_in_graphs(tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama3")
    rounded = copy.deepcopy(model).to(torch.bfloat16).float()
    make_adapter(tmp_path / "1", model, seed=1)
    dice = random.Random(5)
    prompt = tuple(dice.randrange(3, 250) for _ in range(90))
    server = GPUServer(tmp_path / "model")
    server.add(adapter(1, tmp_path))
    events = server.serve(
        [
            request("plain", prompt=50, max_new_tokens=NEW_TOKENS),
            request("0", prompt=prompt, prompt_logprobs=1, arrived_at=1.0),
            request("1", prompt=prompt, prompt_logprobs=1, arrived_at=2.0, adapter=AdapterId(1)),
        ]
    )

    scores: dict[str, list[float]] = {"0": [], "1": []}
    for event in events:
        if isinstance(event, PromptsScored):
            for id, told in zip(event.request_ids, event.scores, strict=True):
                scores[id] += [entry.chosen for entry in told]
    tuned = PeftModel.from_pretrained(copy.deepcopy(rounded), tmp_path / "1").eval()
    for id, reference in (("0", rounded), ("1", tuned)):
        with torch.inference_mode():
            right = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        chosen = right.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert len(scores[id]) == len(prompt) - 1
        assert (torch.tensor(scores[id]) - chosen).abs().mean() < CLEAR_MARGIN * right.std(dim=1).mean()
