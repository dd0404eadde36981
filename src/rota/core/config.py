"""Config says what was asked: defaults, flags and documentation are all made from these dataclasses."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from rota.core.errors import ConfigError
from rota.core.ids import FIRST_ENGINE, EngineId
from rota.core.lora_paths import LoraPath, parse_lora_paths
from rota.core.options import above_0, at_least, option, refuse_unless
from rota.core.policy_config import PolicyConfig
from rota.core.standstill import STANDSTILL_S

# ── listen config ───────────────────────────────────────────────────────────────────────────────────────────────────
# Listening says where clients reach the server, from which sites, and how much a connection may take.

# An origin as browsers send it: without a path, and without the port that belongs to its scheme.
_ORIGIN = re.compile(r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Address, certificate, sites, and limits of connections."""

    host: str = option("127.0.0.1", "Address to listen on; one that others reach needs keys, or allow_anyone.")
    port: int = option(30000, "Port to listen on; 0 picks a free one.")
    ssl_certfile: str | None = option(
        None, "A certificate in PEM format, with its chain: the server then speaks HTTPS, and no HTTP."
    )
    ssl_keyfile: str | None = option(
        None, "The certificate's private key in PEM format, without a password; left out: it is in ssl_certfile."
    )
    max_connections: int | Literal["auto"] = option(
        "auto", "Connections that may be open at a time; 'auto': what the limit of open files allows, at most 16384."
    )
    max_connections_per_address: int | Literal["auto"] = option(
        "auto", "Connections of one address, or of one /64 network of IPv6; 'auto': half of max_connections."
    )
    trusted_proxies: tuple[str, ...] = option(
        (), "Addresses or networks of proxies, also on this machine: max_connections_per_address does not bind them."
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Sites whose pages may use the server through a browser (CORS), as https://chat.example; pages of the server's "
        "own host always may. '*': every site, on a server with keys.",
    )
    head_timeout: float = option(30.0, "Seconds in which a TLS handshake and the headers of a request must arrive.")
    body_timeout: float = option(
        30.0,
        "Seconds in which a body must arrive, and one more for every 10 kB that did; also how long it may rest. Else "
        "the answer is 408.",
    )

    def __post_init__(self) -> None:
        at_least(1, self, "max_connections", "max_connections_per_address")
        above_0(self, "head_timeout", "body_timeout")
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        for origin in self.allowed_origins:
            _check_origin(origin)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give the certificate too.")


def _check_network(proxy: str) -> None:
    try:
        ipaddress.ip_network(proxy)
    except ValueError:
        raise ConfigError(
            f"trusted_proxies has '{proxy}'; give addresses or networks, for example 10.0.0.7 or 10.0.0.0/24."
        ) from None


def _check_origin(origin: str) -> None:
    """'null' is none: browsers send it for pages without a site, and every site can make such pages."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"allowed_origins has '{origin}'; give origins as browsers send them, for example https://chat.example or "
            "http://localhost:3000."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, where, and in what precision."""

    model_path: str | None = option(
        None, "A folder in Hugging Face format, or a hub's name. Left out: the built-in SmolLM2-135M-Instruct."
    )
    load_format: Literal["auto", "dummy"] = option("auto", "'dummy' makes random weights of the model's shape.")
    device: Literal["auto", "cuda", "cpu"] = option("auto", "Where the model runs; 'auto' prefers a GPU.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        "Precision of weights and KV; 'auto' takes what the model folder says, or the nearest that the device "
        "multiplies in hardware: on a CPU without bf16 arithmetic that is float32.",
    )
    quantization: Literal["auto", "fp8", "int4", "none"] = option(
        "auto",
        "Weights in fewer bits. 'auto' serves a folder that says FP8, AWQ or GPTQ as it is, and takes int4 on a CPU "
        "where four bits are stored (the built-in model, AWQ, GPTQ), if dtype is 'auto'. 'fp8' rounds the layers of a "
        "plain folder to eight-bit floats while it is loaded, and the activations of each token; adapters, head and "
        "embedding keep their precision (GPU of compute capability 8.9 or more). 'int4' computes the layers in four "
        "bits, in groups of 32 (on a CPU; a GPU has four bits from AWQ and GPTQ folders alone). On x86 it holds both "
        "precisions, and computes steps of up to 4 tokens in four bits (8 in float32), with activations in bf16. On "
        "ARM it holds four bits alone, and rounds the activations of each token to eight bits. 'none' gives stored "
        "weights the precision of dtype.",
    )
    cpu_threads: int | Literal["auto"] = option(
        "auto",
        "Threads that compute on a CPU; 'auto' tries one thread and all that the container grants, for small steps and "
        "for larger ones. OMP_NUM_THREADS says how many there are.",
    )
    context_length: int | None = option(None, "Longest prompt plus output; left out: what the model allows.")
    attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = option(
        "auto",
        "Attention kernels; 'auto' takes Triton on a GPU and torch on a CPU. 'flashinfer', if installed, takes long "
        "prompts over from Triton.",
    )
    tensor_parallel_size: int = option(
        1,
        "Devices that share one copy of the model, each computing a part of every layer. On one machine the server "
        "starts a process for each; across machines torchrun does.",
    )
    data_parallel_size: int | Literal["auto"] = option(
        1,
        "Copies of the model, called replicas: each is a process of its own with tensor_parallel_size devices, and "
        "serves its share of the requests. On a CPU they share processors and memory. 'auto': as many as the GPUs of "
        "this machine hold, or as the devices of the Ray cluster hold, also when the cluster grows.",
    )
    data_parallel_backend: Literal["local", "ray"] = option(
        "local", "Where replicas run: on this machine, or on the machines of a Ray cluster (needs the extra `ray`)."
    )
    ray_address: str | None = option(
        None,
        "HOST:PORT of the Ray cluster's head, or 'auto': the cluster that this machine belongs to. Left out: the "
        "variable RAY_ADDRESS, or 'auto'.",
    )
    enable_cuda_graphs: bool = option(True, "Replay steps of common sizes as CUDA graphs (GPU only).")

    def __post_init__(self) -> None:
        at_least(2, self, "context_length")
        at_least(1, self, "cpu_threads", "tensor_parallel_size", "data_parallel_size")
        if self.ray_address is not None and self.data_parallel_backend != "ray":
            raise ConfigError(
                f"ray_address is '{self.ray_address}', but replicas run on this machine; leave it out, or add "
                "--data-parallel-backend ray."
            )

    @property
    def replicas(self) -> int:
        """How many replicas there are, once 'auto' is settled."""
        assert self.data_parallel_size != "auto", "the devices were counted before the start"
        return self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much memory holds keys and values, and in what portions."""

    kv_block_size: int = option(16, "Tokens in one KV block: a power of two of at least 8.")
    mem_fraction_static: float | None = option(
        None,
        "Share of device memory for weights and KV together; left out: 0.88 on a GPU, 0.25 of RAM on a CPU.",
    )
    kv_blocks: int | None = option(None, "Number of KV blocks; left out: as many as the memory share holds.")
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto", "Precision of keys and values: the model's, or eight bits and a scale for each token and head."
    )

    def __post_init__(self) -> None:
        if self.kv_block_size < 8 or self.kv_block_size & (self.kv_block_size - 1):
            raise ConfigError(
                f"kv_block_size must be a power of two of at least 8 (8, 16, 32, …), not {self.kv_block_size}."
            )
        at_least(2, self, "kv_blocks")
        _a_share(self, "mem_fraction_static")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many requests may run and wait, and how large a step may be."""

    max_running_requests: int = option(256, "Requests that may run in one step. Parked requests do not count.")
    max_queued_requests: int = option(10_000, "Requests that may wait; one more is refused.")
    chunked_prefill_size: int = option(2048, "Tokens a step may compute, prompts and decodes together.")
    max_step_ms: float | Literal["auto"] = option(
        "auto",
        "Milliseconds that a step beside running answers may take: it computes as many tokens of prompts as fit, by "
        "the speed as measured, and chunked_prefill_size at most. 'auto': the time of four tokens, at least 50 (which "
        "is what it comes to on a GPU) and at most 500.",
    )
    prefill_max_requests: int | None = option(
        None, "Prompts that a step may compute; prompts that have begun always go on. Left out: any number."
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV of prompts that begin alike.")
    overlap_depth: Literal[1, 2] = option(2, "Steps in flight: 2 plans the next step while the device runs this one.")

    def __post_init__(self) -> None:
        at_least(1, self, "max_running_requests", "max_queued_requests", "chunked_prefill_size", "prefill_max_requests")
        above_0(self, "max_step_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which adapters, from where, how many at a time, and how large."""

    adapter_cache_dir: str | None = option(
        None,
        "The folder that keeps adapters of s3://, gs://, az:// and hf:// on disk; left out: rota/adapters in "
        "XDG_CACHE_HOME, or in ~/.cache.",
    )
    adapter_cache_gb: float = option(
        20.0, "Largest size of that folder in GB; the adapters that were read longest ago leave first."
    )
    lora_resolver: str | None = option(
        None,
        "A folder or an address. A request for a NAME that is not loaded loads the adapter at NAME below it first. "
        "Left out: such a request is refused.",
    )
    lora_paths: tuple[str, ...] = option(
        (),
        "Adapters to start with, one or more: PATH, NAME=PATH, or JSON with lora_name, lora_path, pinned and weight. "
        "A path is a folder, an address (s3://, gs://, az://, hf://) or a name on the Hugging Face Hub.",
    )
    enable_builtin_adapters: bool = option(True, "Serve the built-in model with its adapters.")
    max_loras_per_batch: int | Literal["auto"] = option(
        "auto",
        "Adapters on the device at a time, each in a slot. 'auto': one for each adapter at the start and some for "
        "later ones, at least 8, as far as lora_memory_share holds them; with no adapter at the start, as many as it "
        "holds.",
    )
    lora_memory_share: float | None = option(
        None,
        "Share of device memory for adapters when max_loras_per_batch is 'auto'. Left out: 0.05, or less where KV for "
        "max_running_requests would not be left.",
    )
    max_lora_rank: int | Literal["auto"] = option(
        "auto",
        "Largest rank an adapter may have; every slot is this large. 'auto': the largest among the adapters at the "
        "start, or 64 if there are none; if they differ, and slots are 'auto' too, each takes its own rank's memory.",
    )
    max_loaded_loras: int = option(128, "Adapters kept in host memory; one more takes the place of an idle one.")
    adapter_root: str | None = option(
        None,
        "Only adapters in this folder, or below this address, may be loaded, and relative paths start there; left out: "
        "any. Built-in adapters are served either way.",
    )
    lora_backend: Literal["auto", "torch", "triton"] = option(
        "auto", "Kernels that apply adapters; 'auto' takes the same as for attention."
    )
    lora_eviction_policy: Literal["lru", "fifo"] = option(
        "lru",
        "Which adapter leaves the device if another needs its place: the least recently used, or the first that came.",
    )
    enable_lora_overlap_loading: bool = option(
        True, "Copy adapters to the device while steps run; without it a step waits for its adapters."
    )

    def __post_init__(self) -> None:
        above_0(self, "adapter_cache_gb")
        parse_lora_paths(self.lora_paths)
        at_least(1, self, "max_lora_rank", "max_loaded_loras", "max_loras_per_batch")
        _a_share(self, "lora_memory_share")
        if self.max_loras_per_batch != "auto" and self.max_loaded_loras < self.max_loras_per_batch:
            raise ConfigError(
                f"max_loaded_loras is {self.max_loaded_loras}, fewer than max_loras_per_batch "
                f"({self.max_loras_per_batch}): an adapter on the device is also kept in host memory."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ListenConfig):
    """Where the server listens, what it shows, which clients it lets in, and how long it waits."""

    metrics_max_adapters: int = option(
        50, "Adapters with metrics of their own; further adapters count as 'other' while no place is free."
    )
    metrics_max_keys: int = option(
        50, "Keys with metrics of their own; further keys count as 'other' while no place is free."
    )
    picker_metrics: bool = option(
        True, "Also the totals that the endpoint picker of Kubernetes reads, under vLLM's names, in /metrics."
    )
    metrics_port: int | None = option(
        None, "A second port for /metrics and the health probes alone, without keys and TLS; 0 picks a free one."
    )
    metrics_host: str = option(
        "127.0.0.1", "The address of metrics_port; every client that reaches it sees the names of adapters and keys."
    )
    journal_dir: str | None = option(
        None, "A folder of journals (.jsonl) that the dashboard replays by name: /dashboard?journal=run.jsonl."
    )
    otel: bool = option(
        False,
        "Send a trace of every request to an OpenTelemetry collector, as OTEL_* say (needs the extra `otel`).",
    )
    log_format: Literal["text", "json"] = option(
        "text", "How log lines on stderr look; with 'json' every line there is a JSON object, also a library's."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "The lowest level that is logged; 'info' has a line for every request."
    )
    served_model_name: str | None = option(None, "The model's name to clients; left out: its folder's name.")
    api_key: tuple[str, ...] = option((), "A key that may do everything; may be repeated.")
    api_key_file: str | None = option(None, "A TOML file with keys and the rights of each.")
    allow_anyone: bool = option(
        False, "Listen without any key on an address that others reach: every client that reaches it may do everything."
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "pythonic", "mistral", "json", "none"] = option(
        "auto", "In which format the model writes calls of tools; 'auto' takes it from the chat template."
    )
    reasoning_parser: Literal["auto", "think", "qwen3", "deepseek_r1", "mistral", "granite", "none"] = option(
        "auto", "How the model marks its thoughts before an answer; 'auto' takes it from the chat template."
    )
    unknown_fields: Literal["auto", "refuse", "ignore"] = option(
        "auto",
        "Unknown fields of a request: 'auto' ignores those of a list, which change no answer, and refuses the others; "
        "'refuse' and 'ignore' hold for all. An answer names those that were ignored in x-rota-ignored-fields.",
    )
    lora_routes: tuple[str, ...] = option(
        (), "Traffic routes to start with, one or more: NAME=JSON, with the JSON of PUT /v1/adapters/NAME/route."
    )
    reload_changed: bool = option(
        False, "Files of an adapter that changed since they were loaded become a new version; else they are refused."
    )
    max_body_mb: int = option(16, "Largest body of a request, in MB; a larger one is refused.")
    max_adapter_body_mb: int = option(1024, "Largest body with an adapter's weights, in MB; a larger one is refused.")
    stream_keep_alive: float = option(
        15.0, "Seconds of silence after which a stream sends an empty line, and its headers if they have not left."
    )
    drain_timeout: float = option(20.0, "Seconds that open answers may take to end once the server is told to stop.")
    request_timeout: float | None = option(
        None, "Seconds after which a request that has not ended is ended with an error; left out: never."
    )
    engine_silence_s: float = option(
        20.0,
        "Seconds without a word after which the engine has hung and is started again. It is the least: a step that "
        "should take long, by its tokens and by recent steps, may take ten times as long as it should, and up to 300 "
        "seconds.",
    )
    spare_engine: Literal["auto", "on", "off"] = option(
        "auto", "A process waits, its imports done, to replace an engine that dies; 'auto': for an engine on a GPU."
    )

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is made anew, and super() has the old class.
        ListenConfig.__post_init__(self)
        at_least(0, self, "metrics_max_adapters", "metrics_max_keys")
        at_least(1, self, "max_body_mb", "max_adapter_body_mb")
        above_0(self, "stream_keep_alive", "request_timeout")
        if self.metrics_port and self.metrics_port == self.port:
            raise ConfigError(f"metrics_port and port are both {self.port}; give metrics_port another number.")
        if not 1.0 <= self.engine_silence_s < math.inf:
            raise ConfigError(f"engine_silence_s must be a finite number of at least 1, not {self.engine_silence_s}.")
        if not 0.0 <= self.drain_timeout < math.inf:
            raise ConfigError(f"drain_timeout must be a finite number of seconds, 0 or more, not {self.drain_timeout}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAdapters:
    """The adapters to start with, as far as slots follow them. They are looked at once: a restart changes no slot."""

    count: int = 0
    rank: int = 0  # the largest; 0: there is none
    pages: int = 0  # that all of them take together, each as many as its rank needs; 0: not known
    extras: int = 0  # what any of them has besides factors, as `IgnorableField` counts it
    matrices: int = 0  # an embedding or a head of their own: how many all of them have together


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process is built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine_id: EngineId = FIRST_ENGINE
    exchange_at: str = ""  # the folder where replicas share the prefill delayer's reports; "": there is one replica
    builtin_adapters: tuple[LoraPath, ...] = ()
    first: FirstAdapters | None = FirstAdapters()  # None: the server tells while the engine imports
    quiet: bool = False
    standstill_s: float = STANDSTILL_S  # a standstill is told of after so long
    # Of the process that builds this engine: which of the tensor_parallel_size ranks, on which GPU as CUDA counts them,
    # and how many ranks share its machine's processors.
    rank: int = 0
    device_number: int = 0
    local_ranks: int = 1
    meeting: str = ""  # where the ranks' engines find each other; empty: the ranks have not met yet


def _a_share(config: object, *names: str) -> None:
    refuse_unless(lambda value: 0.0 < value < 1.0, "lie between 0 and 1", config, *names)
