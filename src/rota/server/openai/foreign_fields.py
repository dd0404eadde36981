"""Fields that vLLM's and SGLang's clients send to OpenAI's routes, without support: what asks for nothing is taken."""

from __future__ import annotations

from rota.core.errors import RequestError
from rota.server.advice import advice_on
from rota.server.fields import Fields, Unsupported, unless


class ForeignFields(Fields):
    """Beam search, code for the sampler, other inputs than text, and how servers of another kind share work."""

    use_beam_search: Unsupported = None
    length_penalty: Unsupported = unless(1.0)
    early_stopping: Unsupported = None
    detokenize: bool | None = None
    stream_reasoning: bool | None = None
    repetition_detection: Unsupported = None
    thinking_token_budget: Unsupported = None
    stop_regex: Unsupported = None
    logits_processors: Unsupported = None
    custom_logit_processor: Unsupported = None
    custom_params: Unsupported = None
    vllm_xargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None
    max_dynamic_patch: Unsupported = None
    min_dynamic_patch: Unsupported = None
    use_audio_in_video: Unsupported = None
    return_hidden_states: Unsupported = None
    return_routed_experts: Unsupported = None
    return_cached_tokens_details: Unsupported = None
    custom_labels: Unsupported = None
    session_params: Unsupported = None
    extra_key: Unsupported = None
    kv_transfer_params: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None
    routed_dp_rank: Unsupported = None

    def refuse_unsupported(self, where: str = "") -> None:
        super().refuse_unsupported(where)
        for name in ("detokenize", "stream_reasoning"):
            if getattr(self, name) is False:
                message = f"Rota does not support {name} other than true; {advice_on(name)}."
                raise RequestError.bad_field(name, message)
