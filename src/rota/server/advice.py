"""For every field that Rota knows and does not support: the nearest thing that works."""

from __future__ import annotations

_LOGIT_BIAS = "logit_bias, allowed_token_ids and bad_words change which tokens may come"
_TEXT_ONLY = "Rota reads and writes text alone"
_OTHER_SERVERS = "Rota has its own way to spread requests over engines, so leave it out"
_BLANKS = "blanks in JSON are bounded, so leave it out"
_SAMPLES = "n gives several sampled answers, and temperature 0 the likeliest tokens"

ADVICE = {
    "added_tokens_config": "an adapter uses the tokens of the base model",
    "annotations": "leave it out: it says nothing to the model",
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
    "include_obfuscation": "leave it out: events have no padding",
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
    "media_io_kwargs": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "moderation": "leave it out: no answer is judged",
    "namespace": "leave it out: tools have one name",
    "prediction": "leave it out: the answer is the same without it",
    "prompt_embeds": "send the prompt as text or as token ids",
    "raw": "/v1/completions takes raw prompts",
    "return_entropy": "return_logprob gives log-probabilities",
    "return_hidden_states": "/v1/embeddings gives the last hidden state of a text",
    "return_routed_experts": "leave it out",
    "session_params": "send the whole conversation again; the KV of its beginning is found in the cache",
    "stop_regex": "stop takes fixed texts, and regex describes a whole answer",
    "store": "keep the answers yourself: Rota stores none",
    "stream_interval": "leave it out: every token is sent at once",
    "suffix": "write what follows into the prompt, as the model was trained to read it",
    "template": "put a chat_template.jinja into the model's folder",
    "token_ids_logprob": "top_logprobs_num gives the likeliest tokens",
    "tools": "/v1/chat/completions takes tools",
    "use_beam_search": _SAMPLES,
    "verbosity": "ask for a short or long answer in a message",
    "video_data": _TEXT_ONLY,
    "vllm_xargs": _LOGIT_BIAS,
    "web_search_options": "describe a search of your own as one of the tools",
    "whitespace_pattern": _BLANKS,
}


def advice_on(field: str) -> str:
    """What to do instead, as the second half of a sentence."""
    return ADVICE.get(field, "leave it out")
