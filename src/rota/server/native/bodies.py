"""The response bodies of SGLang's routes, for /docs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, RootModel

from rota.server.rota_body import RotaBody


class MetaInfo(BaseModel):
    id: str
    # {"type": "stop", "matched": …}, {"type": "length", "length": …} or {"type": "abort", "message": …}.
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | None = None
    input_token_logprobs: list[Any] | None = None
    output_token_logprobs: list[Any] | None = None
    input_top_logprobs: list[Any] | None = None
    output_top_logprobs: list[Any] | None = None
    rota: RotaBody | None = None


class GeneratedBody(BaseModel):
    """One answer from its beginning. In a stream of several answers it has an index."""

    index: int | None = None
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GenerateBody(RootModel[GeneratedBody | list[GeneratedBody]]):
    """One answer, or a list if the prompts came as a list or n is above 1."""


class ModelInfoBody(BaseModel):
    """Which model is served."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    context_length: int | None
    preferred_sampling_params: dict[str, Any] | None


class ServerInfoBody(BaseModel):
    """The server's version, its capacity and its present state."""

    version: str
    status: str
    model_path: str
    served_model_name: str
    context_length: int | None
    tensor_parallel_size: int | None
    max_running_requests: int | None
    max_total_num_tokens: int | None
    kv_block_size: int | None
    # As torch names it: the model's, or float8_e4m3fn.
    kv_cache_dtype: str | None
    max_loras_per_batch: int | None
    # What the slots take on the device, in use or not.
    lora_memory_bytes: int | None
    # The places for adapters at the start: how many, of which rank, why, how many pages of eight ranks they share (0:
    # each has a place of its own), and the sites where A lie below the model's matrices.
    slots: dict[str, Any] | None
    loaded_adapters: dict[str, str]
    # The adapters that engines died of, and the keys that may load nothing for that.
    quarantine: dict[str, Any]
    # SGLang's name for the requests, blocks, open slots and pages of each engine, as they are now.
    internal_states: list[dict[str, Any]]
    # Each engine: its phase and process, its capacity, the adapters in its slots, its start and last restart, its
    # requests.
    replicas: list[dict[str, Any]]
    # With config_format=json: the model, its dtype, devices and adapters in vLLM's names.
    vllm_config: dict[str, Any] | None = None


class AdaptersBody(BaseModel):
    """The result, and the adapters that are loaded now: folders for operators, names for other keys."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


class AbortedBody(BaseModel):
    """How many open calls were ended."""

    aborted: int


class HealthBody(BaseModel):
    """The server's state, with the reason if it is down."""

    status: str
    reason: str | None = None
