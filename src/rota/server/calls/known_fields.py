"""Fields that Rota knows and has no use for: which are ignored, and what works in the place of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# ── advice ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# For every field that Rota knows and does not support: the nearest thing that works.

_LOGIT_BIAS = "logit_bias, allowed_token_ids and bad_words change which tokens may come"
_TEXT_ONLY = "Rota reads and writes text alone"
_OTHER_SERVERS = "Rota has its own way to spread requests over engines, so leave it out"
_BLANKS = "blanks in JSON are bounded, so leave it out"
_SAMPLES = "n gives several sampled answers, and temperature 0 the likeliest tokens"

ADVICE = {
    "added_tokens_config": "an adapter uses the tokens of the base model",
    "audio": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "background": "keep the connection open, or let a job of your own wait for the answer",
    "best_of": _SAMPLES,
    "bootstrap_host": _OTHER_SERVERS,
    "bootstrap_port": _OTHER_SERVERS,
    "bootstrap_room": _OTHER_SERVERS,
    "caller": "leave it out: a call is the model's own",
    "chat_template": "put a chat_template.jinja into the model's folder, or render the prompt for /v1/completions",
    "citations": "write the sources into the text",
    "container": "Rota runs no code",
    "context": "send the whole conversation as messages",
    "context_management": "leave out old messages yourself; a conversation must fit the context",
    "custom_logit_processor": _LOGIT_BIAS,
    "custom_params": _LOGIT_BIAS,
    "data_parallel_rank": _OTHER_SERVERS,
    "detokenize": "return_token_ids gives the tokens beside the text",
    "dimensions": "a vector of this model means something only as a whole",
    "disable_additional_properties": "write additionalProperties false into the schema",
    "disable_any_whitespace": _BLANKS,
    "documents": "write the documents into a message",
    "early_stopping": _SAMPLES,
    "echo": "add the last message to the answer, or send the rendered prompt to /v1/completions with echo",
    "encrypted_content": "send thoughts in clear, as content",
    "extra_key": "cache_salt keeps the KV of requests apart",
    "guided_whitespace_pattern": _BLANKS,
    "image_data": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "inference_geo": "leave it out: the answer is made where the server runs",
    "input_embeds": "send text, or token ids as input_ids",
    "is_3d_lora_weight": "factors must be matrices, as PEFT saves them",
    "kv_transfer_params": _OTHER_SERVERS,
    "length_penalty": _SAMPLES,
    "load_inplace": "unload the adapter first, then load it",
    "logits_processors": _LOGIT_BIAS,
    "lora_id": "lora_path names an adapter",
    "max_tokens_per_doc": "truncate_prompt_tokens keeps the last tokens of every text",
    "mcp_servers": "let a program of your own call them, and describe them as tools",
    "max_dynamic_patch": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
    "min_dynamic_patch": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "moderation": "leave it out: no answer is judged",
    "namespace": "leave it out: tools have one name",
    "prompt_embeds": "send the prompt as text or as token ids",
    "raw": "/v1/completions takes raw prompts",
    "repetition_detection": "repetition_penalty and frequency_penalty keep an answer from repeating itself",
    "return_cached_tokens_details": "usage.prompt_tokens_details has the cached tokens",
    "return_entropy": "return_logprob gives log-probabilities",
    "return_hidden_states": "/v1/embeddings gives the last hidden state of a text",
    "return_routed_experts": "leave it out",
    "routed_dp_rank": _OTHER_SERVERS,
    "session_params": "send the whole conversation again; the KV of its beginning is found in the cache",
    "stop_regex": "stop takes fixed texts, and regex describes a whole answer",
    "stream_reasoning": "include_reasoning false leaves the thoughts out",
    "stream_interval": "leave it out: every token is sent at once",
    "suffix": "write what follows into the prompt, as the model was trained to read it",
    "template": "put a chat_template.jinja into the model's folder",
    "thinking_token_budget": "max_tokens limits thoughts and answer together, and some templates know reasoning_effort",
    "token_ids_logprob": "top_logprobs_num gives the likeliest tokens",
    "tools": "/v1/chat/completions takes tools",
    "use_audio_in_video": _TEXT_ONLY,
    "use_beam_search": _SAMPLES,
    "video_data": _TEXT_ONLY,
    "vllm_xargs": _LOGIT_BIAS,
    "web_search_options": "describe a search of your own as one of the tools",
    "whitespace_pattern": _BLANKS,
}


def advice_on(field: str) -> str:
    """What to do instead, as the second half of a sentence."""
    return ADVICE.get(field, "leave it out")


# ── ignorable fields ──────────────────────────────────────────────────────────────────────────────────────────────────
# Fields that clients send and that no body has. Those that change no answer are in a table, each with its reason.

UnknownMode = Literal["auto", "refuse", "ignore"]

# Values that ask for nothing, whatever the field.
NOTHING: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class IgnorableField:
    """Fields that are ignored for one reason. `values`: those that ask for nothing. None: no value changes an answer.

    A field in an object has the object's name before its own. Those of samplers count in every object of samplers.
    """

    names: str  # with spaces between them
    why: str
    values: tuple[Any, ...] | None = None


IGNORABLE = (
    IgnorableField(
        "metadata store tags trace_id session_id user_id custom_labels litellm_metadata",
        "notes for a log or a store; the key and `X-Request-Id` tell whose request it is, and no answer is stored",
    ),
    IgnorableField(
        "safety_identifier prompt_cache_key user conversation_id conversation_uuid",
        "who asks, on a route that sends all alike to the same place",
    ),
    IgnorableField(
        "prompt_cache_retention cache_control messages.cache_control tools.cache_control "
        "tools.function.cache_control messages.tool_calls.cache_control",
        "the KV of every prompt is cached, without a mark",
    ),
    IgnorableField("service_tier provider keep_alive", "where and how fast an answer is made is the operator's choice"),
    IgnorableField(
        "verbosity text.verbosity", "no model here was trained on it; ask for a short or long answer in a message"
    ),
    IgnorableField("prediction usage stream_options.include_obfuscation", "the answer is the same without it"),
    IgnorableField("anthropic_version anthropic_beta betas", "the version of an API that has one version here"),
    IgnorableField(
        "messages.id messages.status messages.metadata messages.annotations messages.created_at "
        "messages.timestamp messages.provider_specific_fields messages.tool_calls.provider_specific_fields",
        "a client's notes on a message; no chat template reads them",
    ),
    IgnorableField("images messages.images audio videos", "there is none in an empty list", ()),
    IgnorableField(
        "repeat_last_n mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent dry_base dry_allowed_length "
        "dry_penalty_last_n dry_sequence_breakers",
        "a detail of a sampler that Rota has not, or of penalties, which here count the whole answer",
    ),
    IgnorableField(
        "mirostat top_a xtc_probability dry_multiplier dynatemp_range smoothing_factor epsilon_cutoff "
        "eta_cutoff no_repeat_ngram_size penalty_alpha min_p presence_penalty frequency_penalty top_logprobs",
        "a sampler at 0 is off",
        (0,),
    ),
    IgnorableField(
        "typical_p typical tfs_z tfs smoothing_curve encoder_repetition_penalty guidance_scale num_beams "
        "repetition_penalty repeat_penalty n best_of do_sample",
        "a sampler at 1 is off, and one answer is what comes",
        (1,),
    ),
    IgnorableField(
        "num_keep num_batch num_gpu main_gpu num_thread num_gqa numa low_vram f16_kv vocab_only use_mmap "
        "use_mlock penalize_newline",
        "how Ollama runs a model; here the operator's flags say it",
    ),
)
_BY_NAME = {name: one for one in IGNORABLE for name in one.names.split()}


@dataclass(slots=True)
class UnknownFields:
    """What becomes of the unknown fields of one body, and the names of those that were ignored."""

    mode: UnknownMode = "auto"
    # The first place of each; a field in many messages is told once.
    _ignored: dict[str, str] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self._ignored.values())

    def takes(self, path: str, value: Any) -> bool:
        """Whether an unknown field is ignored. It is told, unless it asks for nothing."""
        known = ignorable(path)
        asks_nothing = value in NOTHING
        if known is None:
            is_taken = self.mode == "ignore" and path.rpartition(".")[2] not in ADVICE
        else:
            allows = known.values is None or value in known.values
            is_taken = asks_nothing or (allows and self.mode != "refuse")
        if is_taken and not asks_nothing:
            self.note(path)
        return is_taken

    def note(self, path: str) -> None:
        self._ignored.setdefault(_without_numbers(path), path)


def ignorable(path: str) -> IgnorableField | None:
    """The entry of the table for a field at this place in a body."""
    name = _without_numbers(path)
    return _BY_NAME.get(name.removeprefix("options.").removeprefix("sampling_params."))


def _without_numbers(path: str) -> str:
    return ".".join(step for step in path.split(".") if not step.isdigit())
