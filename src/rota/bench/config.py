"""A benchmark's options: what it sends, to which server, and where the numbers go."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Literal

from rota.core.errors import ConfigError
from rota.core.options import as_url, at_least, option, refuse_unless
from rota.core.policy_config import READER_PACE

# A scenario or a trace has its own values for these.
RANDOM_ONLY = (
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "lora_request_distribution",
    "lora_zipf_alpha",
    "base_share",
    "cancel_share",
    "cancel_within_s",
)
PICTURES = (".png", ".svg", ".pdf", ".html")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Names and meanings are those of SGLang's benchmark where it has the same option."""

    backend: Literal["rota", "sglang", "vllm", "openai"] = option(
        "rota",
        "How requests are sent: 'sglang' uses /generate, the others /v1/completions. 'openai' sends no fields that "
        "OpenAI does not know, so answers may end early.",
    )
    base_url: str | None = option(None, "The server's address; left out: http://HOST:PORT.")
    host: str = option("127.0.0.1", "The server's host.")
    port: int = option(30000, "The server's port.")
    api_key: str | None = option(None, "Sent as 'Authorization: Bearer KEY'; left out: the environment's ROTA_API_KEY.")
    model: str | None = option(None, "The base model's name; left out: the name that the server lists.")
    dataset_name: Literal["random", "random-ids", "scenario", "trace"] = option(
        "random",
        "What is sent: 'random' is text of common words, one token each in today's tokenizers. 'random-ids' is token "
        "ids. 'scenario' and 'trace' are read from a file, and their prompts are token ids.",
    )
    dataset_path: str | None = option(
        None, "The trace: one line of JSON per request, with at, prompt or prompt_tokens, output_tokens and adapter."
    )
    scenario: str | None = option(None, "The scenario: a TOML file that 'rota simulate' reads too.")
    num_prompts: int | None = option(
        None,
        "Requests to send; left out: 1000, or all of a scenario or trace. Each client of a scenario sends this many.",
    )
    request_rate: float | None = option(
        None, "Requests per second, at random moments; left out: all at once (inf), or the scenario's rate."
    )
    max_concurrency: int | None = option(
        None, "Most requests open at a time; the next one waits for an answer to end. In a scenario: for each client."
    )
    random_input_len: int = option(1024, "Tokens in the longest prompt.")
    random_output_len: int = option(1024, "Tokens in the longest answer.")
    random_range_ratio: float = option(
        0.0, "Lengths are drawn from [max(1, int(N × this)), N]; 1.0 makes all of them N."
    )
    vocab_size: int = option(
        32_000,
        "Token ids are drawn from below this number, for every server alike; no model may have a smaller vocabulary.",
    )
    lora_name: tuple[str, ...] = option(
        (),
        "Adapters to ask for, one or more; left out: none. A scenario then takes the adapters that the server lists.",
    )
    lora_request_distribution: Literal["uniform", "distinct", "skewed"] = option(
        "uniform", "Which adapter a request names: any of them, each in turn, or the first most often."
    )
    lora_zipf_alpha: float = option(1.5, "With 'skewed': how many times as often an adapter is named as the next one.")
    base_share: float = option(0.0, "Share of requests for the base model when there are adapters.")
    cancel_share: float = option(0.0, "Share of clients that leave before their answer is complete.")
    cancel_within_s: float = option(10.0, "Those clients leave at a random moment within this many seconds.")
    disable_ignore_eos: bool = option(
        False, "Let answers end at their end-of-sequence token, before their full length."
    )
    stall_timeout_s: float = option(600.0, "A stream that is silent for this many seconds has failed.")
    reader_pace: float = option(
        READER_PACE, "Tokens a second that a reader takes: by it is told how long readers stand without text; 0: not."
    )
    seed: int = option(0, "The same seed sends the same requests to every server.")
    warmup_requests: int = option(1, "Short requests before the first measured one.")
    json: str | None = option(None, "Write the numbers to this file.")
    output_file: str | None = option(None, "Append the numbers to this file as one line of JSON.")
    plot: str | None = option(None, "Draw times to first token and token gaps over time (.png, .svg, .pdf, .html).")

    def __post_init__(self) -> None:
        self._check_source()
        at_least(1, self, "num_prompts", "max_concurrency", "random_input_len", "random_output_len")
        shares = ("random_range_ratio", "base_share", "cancel_share")
        refuse_unless(lambda value: 0.0 <= value <= 1.0, "be between 0 and 1", self, *shares)
        at_least(16, self, "vocab_size")
        at_least(0, self, "warmup_requests")
        if self.plot is not None and PurePath(self.plot).suffix not in PICTURES:
            raise ConfigError(f"plot must end in {', '.join(PICTURES)}, not '{self.plot}'.")
        refuse_unless(lambda value: value > 0.0, "be above 0", self, "request_rate")
        refuse_unless(lambda value: 0.0 <= value < math.inf, "be 0 or more", self, "reader_pace")

    def _check_source(self) -> None:
        if self.dataset_name == "scenario" and self.scenario is None:
            raise ConfigError("dataset_name is 'scenario'; name its file with --scenario.")
        if self.dataset_name == "trace" and self.dataset_path is None:
            raise ConfigError("dataset_name is 'trace'; name its file with --dataset-path.")
        if self.scenario is not None and self.dataset_name in ("random-ids", "trace"):
            raise ConfigError(f"scenario does not go with dataset_name '{self.dataset_name}'.")
        if self.dataset_path is not None and self.dataset_name != "trace":
            raise ConfigError("dataset_path is the file of a trace; say --dataset-name trace.")
        if self.source not in ("random", "random-ids"):
            self._check_no_random_fields()

    def _check_no_random_fields(self) -> None:
        for one in fields(self):
            if one.name in RANDOM_ONLY and getattr(self, one.name) != one.default:
                raise ConfigError(f"{one.name} is for random prompts; a {self.source} has its own value.")
        if self.source == "trace" and self.request_rate is not None:
            raise ConfigError("request_rate does not go with a trace, which says when each request is sent.")
        if self.source == "trace" and self.lora_name:
            raise ConfigError("lora_name does not go with a trace, which names its adapters.")

    @property
    def source(self) -> str:
        """Where requests come from. A scenario's file alone is enough."""
        return "scenario" if self.scenario is not None else self.dataset_name

    @property
    def url(self) -> str:
        return as_url(self.base_url or f"{self.host}:{self.port}").rstrip("/")
