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
    stop_regex: Unsupported = None
    logits_processors: Unsupported = None
    custom_logit_processor: Unsupported = None
    custom_params: Unsupported = None
    vllm_xargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    media_io_kwargs: Unsupported = None
    return_hidden_states: Unsupported = None
    return_routed_experts: Unsupported = None
    session_params: Unsupported = None
    extra_key: Unsupported = None
    kv_transfer_params: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    data_parallel_rank: Unsupported = None

    def refuse_unsupported(self, where: str = "") -> None:
        super().refuse_unsupported(where)
        if self.detokenize is False:
            message = f"Rota does not support detokenize other than true; {advice_on('detokenize')}."
            raise RequestError.bad_field("detokenize", message)
