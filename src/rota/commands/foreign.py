"""A foreign flag is one of vLLM's or SGLang's: ours by another name, needless here, or refused with a sentence.

`rota serve` understands them by this table, and the tables of docs/from-vllm.md and docs/from-sglang.md are made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rota.core.errors import ConfigError

Read = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag under the names of those who have it. Without `ours` it is refused, unless it `is_needless`."""

    vllm: str  # its names there, by spaces; empty: vLLM has none
    sglang: str
    ours: str  # what is typed here in its place
    sentence: str = ""  # without its capital: what differs, why nothing is needed, or what to do
    read: Read | None = None  # what a value there is here; nothing: the default says the same
    values: int = 1  # how many it takes; MANY: all up to the next flag
    is_needless: bool = False

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys(f"{self.vllm} {self.sglang}".split())]


MANY = 1 << 30
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# vLLM counts what a step computes with too. This is what its default has more than ours.
BESIDE_STATIC = 0.04


def _count(text: str) -> Sequence[str]:
    """8k, 8K or 8192; `auto` and -1 are what the model allows."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text)
    if text in ("auto", "-1"):
        return ()
    return [str(int(float(number[1]) * _UNITS[number[2]])) if number else text]


def _static_share(text: str) -> Sequence[str]:
    try:
        return [f"{float(text) - BESIDE_STATIC:.4g}"]
    except ValueError:
        raise ConfigError(f"--gpu-memory-utilization must be a number between 0 and 1, not '{text}'.") from None


def _words(known: Mapping[str, str]) -> Read:
    return lambda text: [known.get(text.lower(), text)]


def _items(text: str) -> Sequence[str]:
    """A list in JSON, or one value."""
    try:
        found = json.loads(text)
    except ValueError:
        return [text]
    return list(map(str, found)) if isinstance(found, list) else [text]


def _lora_modules(text: str) -> Sequence[str]:
    """NAME=PATH, or JSON with name and path: one object or a list of them."""
    if not text.startswith(("{", "[")):
        return [text]
    try:
        found = json.loads(text)
        listed = found if isinstance(found, list) else [found]
        return [json.dumps({"lora_name": one["name"], "lora_path": one["path"]}) for one in listed]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"--lora-modules: {text} is no JSON with name and path.") from None


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────
# By the command lines of vLLM 0.32.0 and SGLang 0.5.23.


def _needless(vllm: str, sglang: str, sentence: str, values: int = 0) -> ForeignFlag:
    return ForeignFlag(vllm, sglang, "", sentence, values=values, is_needless=True)


def _none(vllm: str, sglang: str, sentence: str) -> ForeignFlag:
    return ForeignFlag(vllm, sglang, "", sentence)


_IN_FOLDER = dict.fromkeys(("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq"), "auto")
_DTYPES = {"half": "float16", "float": "float32"}
_KERNELS = dict.fromkeys(("flash_attn", "fa3", "fa4"), "auto") | {
    "triton_attn": "triton",
    "torch_native": "torch",
    "flashinfer": "flashinfer",
}
_LORA_KERNELS = {"csgmv": "auto", "triton_v2": "triton", "torch_native": "torch"}
_KV_TYPES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8"}
_CALLS = {"qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "llama4_pythonic": "pythonic"}
_THOUGHTS = {"deepseek-r1": "deepseek_r1", "qwen3-thinking": "deepseek_r1", "granite_thinking_parser": "granite"}
_LEVELS = {"critical": "error", "trace": "debug"}

# fmt: off
FOREIGN_FLAGS = (
    # The model
    ForeignFlag("--model", "--model", "--model-path", "it may also stand without a flag, as `rota serve MODEL`."),
    ForeignFlag("--max-model-len", "", "--context-length", "`8k` is 8000 and `8K` 8192; `auto` is what is left out.", _count),
    ForeignFlag("--dtype", "--dtype", "--dtype", "`half` is `float16`, `float` is `float32`.", _words(_DTYPES)),
    ForeignFlag("--quantization -q", "--quantization", "--quantization", "folders in AWQ and GPTQ say so themselves, so their names are `auto`; `fp8` rounds a plain folder, as there.", _words(_IN_FOLDER)),
    ForeignFlag("--load-format", "--load-format", "--load-format", "weights are read from safetensors; `dummy` is as there.", _words({"safetensors": "auto"})),
    ForeignFlag("--served-model-name", "--served-model-name", "--served-model-name", "one name; a second one is refused."),
    ForeignFlag("--attention-backend", "--attention-backend", "--attention-backend", "`FLASH_ATTN`, `fa3` and `fa4` are `auto`: Rota has attention kernels of its own.", _words(_KERNELS)),
    ForeignFlag("--enforce-eager", "--disable-cuda-graph", "--no-enable-cuda-graphs", values=0),
    _needless("--trust-remote-code", "--trust-remote-code", "no code of a model's folder is run; the families are listed in README."),
    _needless("--runner --convert", "", "`/v1/embeddings` is served by every model.", 1),
    _needless("", "--is-embedding", "`/v1/embeddings` is served by every model."),
    _needless("--seed", "--random-seed", "a request's own `seed` makes its answer repeatable.", 1),
    _needless("--limit-mm-per-prompt", "--limit-mm-data-per-request", "there are no images, audio or video.", 1),
    _none("--revision", "--revision", "download that revision, and name its folder."),
    _none("--tokenizer", "--tokenizer-path", "the tokenizer is that of the model's folder."),
    _none("--tokenizer-mode", "--tokenizer-mode", "the tokenizer is that of the model's folder."),
    _none("--download-dir", "--download-dir", "set HF_HOME in the environment."),
    _none("--hf-token", "", "set HF_TOKEN in the environment."),
    _none("--hf-overrides", "--json-model-override-args", "change config.json in a copy of the folder."),
    _none("--chat-template", "--chat-template", "write the template into chat_template.jinja of the model's folder."),
    _none("--default-chat-template-kwargs", "--default-chat-template-kwargs", "a request has chat_template_kwargs."),
    _none("--generation-config --override-generation-config", "--sampling-defaults --preferred-sampling-params", "leave it out: a request says how it is sampled, and what it does not say has OpenAI's defaults."),
    _none("--skip-tokenizer-init", "--skip-tokenizer-init", "/generate takes input_ids, and gives output_ids."),
    # Adapters
    _needless("--enable-lora", "--enable-lora", "adapters are always served."),
    ForeignFlag("--lora-modules", "", "--lora-paths", "`name=path`, or JSON with name and path; `base_model_name` is not read.", _lora_modules, MANY),
    ForeignFlag("--max-loras", "", "--max-loras-per-batch", "left out, Rota makes slots for the adapters at the start, at least 8; vLLM makes one."),
    ForeignFlag("--max-cpu-loras", "", "--max-loaded-loras", "128 if left out; in vLLM as many as --max-loras."),
    ForeignFlag("", "--max-loras-per-batch", "--max-loras-per-batch", "the base model takes none of them; in SGLang it counts as one."),
    ForeignFlag("--max-lora-rank", "--max-lora-rank", "--max-lora-rank", "any number; left out, it is the largest among the adapters at the start. vLLM's default is 16."),
    ForeignFlag("", "--lora-backend", "--lora-backend", "`csgmv` is `auto`: Rota has kernels of its own.", _words(_LORA_KERNELS)),
    ForeignFlag("", "--lora-drain-wait-threshold", "--lora-drain-wait-threshold", "as in SGLang, with `--lora-policy drain`, which a number above 0 asks for; without it Rota rotates."),
    _needless("--fully-sharded-loras", "", "each rank has its part of every adapter."),
    _needless("", "--lora-strict-loading", "an adapter with missing or foreign weights is always refused."),
    _needless("--lora-dtype", "--max-lora-chunk-size", "adapters have the model's precision, and kernels choose their own sizes.", 1),
    _none("--lora-target-modules", "--lora-target-modules", "every slot has room for all projections, so leave it out."),
    # Memory
    ForeignFlag("--gpu-memory-utilization --device-memory-utilization", "", "--mem-fraction-static", f"{BESIDE_STATIC:g} less, because vLLM's number also counts what a step computes with.", _static_share),
    ForeignFlag("--kv-cache-dtype", "--kv-cache-dtype", "--kv-cache-dtype", "`fp8_e4m3` is `fp8`: eight bits, with a scale for each token and head. `fp8_e5m2` is refused.", _words(_KV_TYPES)),
    ForeignFlag("--block-size", "--page-size", "--kv-block-size", "a power of two of at least 8; prefixes are found by blocks."),
    ForeignFlag("--num-gpu-blocks-override", "", "--kv-blocks"),
    ForeignFlag("", "--disable-radix-cache", "--no-enable-prefix-caching", values=0),
    _needless("", "--radix-eviction-policy", "the prefix that was used longest ago leaves first.", 1),
    _none("--kv-cache-memory-bytes", "--max-total-tokens", "--kv-blocks says how many blocks of --kv-block-size tokens there are."),
    _none("--cpu-offload-gb", "--cpu-offload-gb", "weights stay on the device; --quantization makes them smaller."),
    _none("--kv-offloading-size --kv-transfer-config", "--enable-hierarchical-cache --enable-hicache", "KV stays on the device; a sequence that is preempted is computed again."),
    # The scheduler
    ForeignFlag("--max-num-seqs", "", "--max-running-requests", "with --data-parallel-size it holds for each replica."),
    ForeignFlag("--max-num-batched-tokens", "", "--chunked-prefill-size", "tokens of a step, as in vLLM; --max-step-ms bounds a step by time as well.", _count),
    ForeignFlag("", "--chunked-prefill-size", "--chunked-prefill-size", "all tokens of a step, with decodes; there is no -1, because long prompts always come in chunks."),
    ForeignFlag("--max-num-queued-reqs", "", "--max-queued-requests"),
    ForeignFlag("--no-async-scheduling", "--disable-overlap-schedule", "--overlap-depth 1", values=0),
    _needless("--async-scheduling --enable-chunked-prefill", "--enable-mixed-chunk", "steps are always planned ahead, and long prompts come in chunks."),
    _needless("--scheduling-policy", "--schedule-policy", "a request with a higher priority goes first, then the earlier one; adapters share slots by --lora-policy.", 1),
    _needless("", "--enable-priority-scheduling", "requests may always have a priority; the higher number goes first."),
    _needless("--stream-interval", "--schedule-conservativeness --num-continuous-decode-steps --stream-interval", "steps are planned by what was measured, and every step's tokens are sent.", 1),
    _needless("--max-cudagraph-capture-size", "--cuda-graph-max-bs-decode", "which steps become graphs follows from --max-running-requests.", 1),
    _needless("--cudagraph-capture-sizes", "--cuda-graph-bs-decode", "which steps become graphs follows from --max-running-requests.", MANY),
    _needless("--compilation-config -cc --optimization-level", "", "nothing is compiled but Rota's own kernels, once.", 1),
    _needless("", "--enable-torch-compile", "nothing is compiled but Rota's own kernels, once."),
    _none("", "--max-prefill-tokens", "--chunked-prefill-size bounds the tokens of a step."),
    _none("--speculative-config -sc", "--speculative-algorithm", "there is no speculative decoding; leave it out."),
    # Several devices
    ForeignFlag("-tp", "--tp-size --tp", "--tensor-parallel-size"),
    ForeignFlag("-dp", "--dp-size --dp", "--data-parallel-size", "every replica has all adapters, and a request goes where it loses the least time."),
    ForeignFlag("--data-parallel-backend -dpb", "", "--data-parallel-backend", "`mp` is `local`.", _words({"mp": "local"})),
    _needless("--disable-custom-all-reduce", "--disable-custom-all-reduce", "a sum between ranks is made by what suits its size."),
    _needless("", "--load-balance-method", "a request goes to the replica where it loses the least time.", 1),
    _none("--pipeline-parallel-size -pp", "--pp-size --pipeline-parallel-size", "--tensor-parallel-size cuts a model over devices."),
    _none("--distributed-executor-backend", "--nnodes", "--tensor-parallel-size starts its ranks itself, torchrun does so across machines, and --data-parallel-backend ray places replicas."),
    _none("--enable-expert-parallel -ep", "--ep-size --ep --enable-dp-attention", "there are no mixtures of experts; --tensor-parallel-size cuts a model over devices."),
    _none("--device-ids", "--base-gpu-id", "CUDA_VISIBLE_DEVICES says which GPUs there are."),
    # The server
    ForeignFlag("--uvicorn-log-level", "--log-level", "--log-level", "`critical` is `error`, `trace` is `debug`.", _words(_LEVELS)),
    ForeignFlag("--no-enable-log-requests --disable-log-requests", "", "--log-level warning", values=0),
    ForeignFlag("--allowed-origins", "", "--allowed-origins", "a list in JSON, or words. Methods and headers need no flag.", _items, MANY),
    ForeignFlag("--shutdown-timeout", "", "--drain-timeout"),
    ForeignFlag("--sse-keep-alive-interval", "", "--stream-keep-alive", "15 if left out, and never 0."),
    ForeignFlag("", "--watchdog-timeout", "--engine-silence-s", "an engine that hangs is started again, and the server stays."),
    ForeignFlag("--api-key", "--api-key", "--api-key", "several keys repeat the flag. They guard all routes but probes and `/docs`; `--api-key-file` gives each customer a key."),
    ForeignFlag("--tool-call-parser", "--tool-call-parser", "--tool-call-parser", "`auto`, the default, takes it from the chat template; `qwen25` is `hermes`, `llama3` is `llama3_json`.", _words(_CALLS)),
    ForeignFlag("--reasoning-parser", "--reasoning-parser", "--reasoning-parser", "`auto`, the default, takes it from the chat template.", _words(_THOUGHTS)),
    _needless("--enable-auto-tool-choice", "", "tools are served where the chat template has them."),
    _needless("", "--enable-metrics", "`/metrics` is always there."),
    _needless("--enable-log-requests", "--log-requests", "`--log-level info`, the default, has a line for every request."),
    _needless("--disable-log-stats", "", "`/metrics` has the figures, and the log has none of its own."),
    _needless("--disable-uvicorn-access-log", "", "the log has a line for each request that ended, and `--log-level warning` leaves it out."),
    _needless("", "--skip-server-warmup", "the start ends with a few steps, and they take a moment."),
    _needless("--enable-prompt-tokens-details --enable-request-id-headers --enable-tokenizer-info-endpoint", "--enable-cache-report", "the answer or the route has it always."),
    _needless("--max-logprobs", "", "a request may ask for 20.", 1),
    _needless("", "--decode-log-interval --log-requests-level", "the log has a line for each request, and `/metrics` has the rest.", 1),
    _needless("--structured-outputs-config", "--grammar-backend", "schemas and grammars are followed by the library llguidance.", 1),
    _needless("--api-server-count", "--tokenizer-worker-num", "one process serves HTTP, and others read large bodies.", 1),
    _none("--logits-processors --middleware --tool-parser-plugin", "--enable-custom-logit-processor", "no code is loaded by a flag or a request."),
    _none("--enable-sleep-mode", "--enable-memory-saver", "memory is held until the server ends; /pause stops steps."),
    _none("--otlp-traces-endpoint", "--enable-trace --otlp-traces-endpoint", "--otel sends traces, and OTEL_EXPORTER_OTLP_ENDPOINT says where."),
    _none("--uds --root-path", "--fastapi-root-path", "let a proxy in front do that."),
    _none("--ssl-ca-certs", "--ssl-ca-certs", "clients show keys, not certificates; a proxy in front can ask for them."),
    _none("", "--admin-api-key", "--api-key-file says for each key whether it may operate."),
    _none("", "--disaggregation-mode", "prompts and answers are computed on the same device."),
    _none("", "--enable-deterministic-inference", "a sum may round differently beside other requests."),
)
# fmt: on
_BY_NAME = {name: flag for flag in FOREIGN_FLAGS for name in flag.names}


def also_called(option: str) -> str:
    """A sentence for the help of one of our options: what it is called elsewhere; empty if nothing."""
    ours = f"--{option.replace('_', '-')}"
    names = [name for flag in FOREIGN_FLAGS if flag.ours.split(" ")[0] == ours and flag.values for name in flag.names]
    return f" Also {', '.join(others)}." if (others := [name for name in names if name != ours]) else ""


# ── what was typed ──────────────────────────────────────────────────────────────────────────────────────────────────


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The same arguments with our flags, and a sentence for each that had another name or value."""
    _refuse_second_name(arguments)
    flags = _TypedFlags()
    for at, argument in enumerate(arguments):
        if argument == "--":
            flags.arguments += arguments[at:]
            break
        flags.take(argument)
    return flags.arguments, flags.sentences()


def _refuse_second_name(arguments: Sequence[str]) -> None:
    """Otherwise the second name would be taken for the model."""
    for at, argument in enumerate(arguments):
        if argument.replace("_", "-") == "--served-model-name":
            names = list(takewhile(lambda word: not word.startswith("-"), arguments[at + 1 :]))
            is_named = not arguments[1].startswith("-") or {"--model", "--model-path"} & {*arguments}
            if len(names) > (1 if is_named else 2):
                raise ConfigError(f"A model has one name here: give --served-model-name {names[0]} alone.")


class _TypedFlags:
    def __init__(self) -> None:
        self.arguments: list[str] = []
        self._used: list[tuple[ForeignFlag, list[str], list[str]]] = []  # what was typed, and what it is here
        self._left = 0  # values that belong to the last flag

    def take(self, argument: str) -> None:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if flag := _BY_NAME.get(name):
            if not flag.ours and not flag.is_needless:
                raise ConfigError(f"Rota has no {name}: {flag.sentence}")
            self._used.append((flag, [name], flag.ours.split()))
            self.arguments += flag.ours.split()
            self._left = flag.values
            if equals:
                self._value(value)
                self._left = 0
        elif self._left and not (argument.startswith("-") and len(argument) > 1 and not argument[1].isdigit()):
            self._value(argument)
        else:
            self.arguments.append(f"{name}{equals}{value}")
            self._left = 0

    def _value(self, typed: str) -> None:
        self._left -= 1
        flag, words, here = self._used[-1]
        words.append(typed)
        if flag.is_needless:
            return
        read = list(flag.read(typed)) if flag.read else [typed]
        if not read and len(words) == 2:
            self.arguments.pop()  # the flag: its default says the same
        here += read
        self.arguments += read

    def sentences(self) -> list[str]:
        return [_said(*one) for one in self._used if one[1] != one[2]]


def _said(flag: ForeignFlag, words: list[str], here: list[str]) -> str:
    if flag.is_needless:
        return f"{words[0]} needs nothing here: {flag.sentence}"
    shown = 1 if words[1:] == here[1:] or flag.values == MANY else None
    return f"{' '.join(words[:shown])} is {' '.join(here[:shown])} here."
