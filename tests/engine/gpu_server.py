"""A server on a GPU, and how near its answers are to a reference's, beside a twin that computes as coarsely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch

from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.engine.build import build_engine
from rota.runtime.doorbell import Doorbell
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.agreement import Agreement, logits_of, told_logprobs
from tests.engine.lora.mixed_server import Server
from tests.worlds import outputs


class GPUServer(Server):
    """In bfloat16 with graphs, short chunks and short turns; or on a CPU in float32."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 2,
        rows: int = 16,
        first: FirstAdapters | None = None,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        quantization: Literal["auto", "fp8", "int4", "none"] = "auto",
        device: Literal["cuda", "cpu"] = "cuda",
    ) -> None:
        self._max_open = 100
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if device == "cuda" else "float32"
        self.config = EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype=dtype, device=device, quantization=quantization),
            cache=CacheConfig(kv_blocks=512, kv_cache_dtype=kv_cache_dtype),
            scheduler=SchedulerConfig(max_running_requests=rows, chunked_prefill_size=32),
            lora=LoraConfig(max_loras_per_batch=slots, max_lora_rank=16),
            policy=PolicyConfig(lora_rotation_quantum_ms=5.0, lora_max_stall_ms=10.0),
            first=first or FirstAdapters(),
            quiet=True,
        )
        self.engine = build_engine(self.config)
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()


def assert_near(
    server: Server,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    references: Iterable[tuple[int, torch.nn.Module]],
    twin_of: Callable[[torch.nn.Module], torch.nn.Module],
) -> dict[RequestId, list[int]]:
    """All prompts at once with all adapters that have a reference; 0 is the base model."""
    references = list(references)
    asked = [
        request(f"{place}-{number}", tuple(prompt), new_tokens, adapter=AdapterId(number), logprobs=0)
        for place, prompt in enumerate(prompts)
        for number, _ in references
    ]
    events = server.serve(asked)
    given, told, agreement = outputs(events), told_logprobs(events), Agreement()
    for number, reference in references:
        twin = twin_of(reference)
        for place, prompt in enumerate(prompts):
            id = RequestId(f"{place}-{number}")
            right, coarse = (logits_of(model, prompt, given[id]) for model in (reference, twin))
            agreement.take(given[id], told[id], right, coarse, f"adapter {number}, prompt {place}")
    agreement.check()
    return given
