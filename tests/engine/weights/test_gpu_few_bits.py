"""On a GPU, in graphs and under rotation, weights in few bits answer like the weights that their folder means."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.engine.build import build_engine
from rota.engine.choices import FLOAT8_CAPABILITY
from rota.runtime.doorbell import Doorbell
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.agreement import Agreement, in_bfloat16, in_eight_bits, logits_of, told_logprobs
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.weights.writers import EIGHT, FOUR, write_model
from tests.worlds import outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

NEW_TOKENS = 32
# No product has scales for blocks: matrices are rounded again.
BLOCKS = ("8: fine-grained", "8: compressed-tensors, blocks")


class GPUServer(Server):
    """The tests' server in bfloat16, with graphs, two slots and short turns."""

    def __init__(self, folder: Path, quantization: str = "auto") -> None:
        self.config = EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="bfloat16", device="cuda", quantization=quantization),
            cache=CacheConfig(kv_blocks=512),
            scheduler=SchedulerConfig(max_running_requests=16, chunked_prefill_size=32),
            lora=LoraConfig(max_loras_per_batch=2, max_lora_rank=16),
            policy=PolicyConfig(lora_rotation_quantum_ms=5.0, lora_max_stall_ms=10.0),
            quiet=True,
        )
        self.engine = build_engine(self.config)
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()
        self._max_open = 100


@pytest.mark.parametrize("layout", ["plain, rounded to FP8", *EIGHT, *FOUR])
def test_a_mixed_batch_is_answered_like_the_weights_that_the_folder_means(layout, tmp_path):
    bits = 4 if layout in FOUR else 8
    if bits == 8 and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip("this GPU has no eight-bit floats")
    is_plain = layout.startswith("plain")
    folder = tmp_path / "model"
    model = make_tiny_model(folder, "llama2", intermediate_size=128) if is_plain else write_model(folder, layout)
    for number in (1, 2, 3):
        make_adapter(tmp_path / str(number), model, seed=number, r=4 * number)
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(3, 250) for _ in range(length)) for length in (4, 50, 90)]
    server = GPUServer(folder, "fp8" if is_plain else "auto")
    server.add(*(adapter(number, tmp_path) for number in (1, 2, 3)))
    asked = [
        request(f"{place}-{number}", prompt=prompt, max_new_tokens=NEW_TOKENS, adapter=AdapterId(number), logprobs=0)
        for place, prompt in enumerate(prompts)
        for number in range(4)
    ]
    events = server.serve(asked)
    given, told, agreement = outputs(events), told_logprobs(events), Agreement()

    for number in range(4):
        tuned = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / str(number)).eval() if number else model
        twin = in_bfloat16(tuned) if bits == 4 else in_eight_bits(tuned, rounds_matrices=is_plain or layout in BLOCKS)
        for place, prompt in enumerate(prompts):
            id = RequestId(f"{place}-{number}")
            right, coarse = (logits_of(one, prompt, given[id]) for one in (tuned, twin))
            agreement.take(given[id], told[id], right, coarse, f"adapter {number}, prompt {place}")
    agreement.check()
