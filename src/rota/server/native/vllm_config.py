"""What vLLM's clients read of a server's config, in vLLM's names."""

from __future__ import annotations

from typing import Any

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.errors import Fault, FaultCode, RequestError


def vllm_config(base: Adapter, capacity: Capacity | None) -> dict[str, Any]:
    """Raises RequestError while no engine serves: what is written here is what an engine found.

    A client takes one replica for the server: `data_parallel_size` is 1, because an adapter that is loaded here
    reaches all replicas, which vLLM's does not.
    """
    if capacity is None:
        raise RequestError(Fault(FaultCode.ENGINE_DIED, "No engine serves yet, so its config is not known."))
    return {
        "model_config": {
            "model": base.path,
            "served_model_name": base.name,
            "dtype": f"torch.{capacity.dtype}" if capacity.dtype else None,
            "max_model_len": capacity.max_sequence_tokens,
        },
        "parallel_config": {
            "tensor_parallel_size": capacity.ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": capacity.ranks,
        },
        "scheduler_config": {"max_num_seqs": capacity.rows},
        "cache_config": {"block_size": capacity.block_size, "cache_dtype": capacity.kv_dtype},
        "lora_config": {"max_lora_rank": capacity.slot_rank, "max_loras": capacity.slots} if capacity.slots else None,
    }
