"""Chat templates and control tokens in the manner of every family, and tokenizers that have them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.last and reasoning_content %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% else %}"
    "{{ '<|' ~ message['role'] ~ '|>\n' ~ message['content'] ~ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GRANITE = (
    "{%- for message in messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] "
    "+ '<|end_of_text|>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' + "
    "(first_user_prefix if loop.first else '') }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)
# The template completes a control token with a role, and with a name: a user may send that.
COMPLETING = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message.name %}"
    "{{ '<|' ~ message.name ~ '|>' }}{% endif %}{{ message['content'] }}<|end|>{% endfor %}<|assistant|>"
)
# Ways of a text through a template that nothing here foresees.
WINDING = (
    "{% macro shown(text) %}{{ text }}{% endmacro %}{% for message in messages %}<|im_start|>"
    "{{ [message['name'] | default(''), shown(message['content'] | trim) | replace('x', '')] | join('') }}"
    "{{ message['content'] | tojson }}{% set held %}{{ message['content'] | upper }}{% endset %}{{ held | lower }}"
    "{{ '%s' % message['content'] }}{{ message['content'] | reverse }}<|im_end|>{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A template and the tokens that it needs."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    kind: str = "byte_level"

    def write(self, folder: Path) -> Path:
        """A model folder with this template."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer().save(str(folder / "tokenizer.json"))
        roles = {"bos_token": self.special[0], "eos_token": self.special[1]}
        settings: dict[str, Any] = {"chat_template": self.template, **roles}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(_trained(self.kind).to_str())
        tokenizer.add_special_tokens(list(self.special))
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        return tokenizer

    @property
    def control_tokens(self) -> tuple[str, ...]:
        return self.special + self.added


FAMILIES = {
    "chatml": Family(CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>")),
    "qwen3": Family(
        QWEN3,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        ("<think>", "</think>", "<tool_response>", "</tool_response>"),
    ),
    "llama3": Family(LLAMA3, ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")),
    "mistral": Family(MISTRAL, ("<s>", "</s>"), kind="prepend"),
    "mistral3": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), kind="metaspace"),
    "olmo2": Family(OLMO2, ("<|endoftext|>", "<|pad|>")),
    "granite": Family(GRANITE, ("<|pad|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>")),
    "gemma3": Family(GEMMA, ("<bos>", "<end_of_turn>", "<start_of_turn>"), kind="plain_spaces"),
}


@cache
def _trained(kind: str) -> Tokenizer:
    texts = ["the user asks the system a question, and the assistant answers: <b>1 | 2</b> [3]; café 😀\n\n"] * 3
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return tokenizer
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("s", "t"), ("<", "|"), ("|", ">")]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz_<|>/[]"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
