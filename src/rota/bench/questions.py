"""A workload holds every question that a benchmark sends, made from a config and a seed: the same for every server."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import msgspec

from rota.bench.config import BenchConfig
from rota.core.adapter import BASE_LABEL
from rota.core.errors import ConfigError
from rota.core.ids import BASE, AdapterId, RequestId
from rota.workload.arrivals import Arrival, asks, visits
from rota.workload.scenario import Client, Scenario, read_scenario

# ── workload ────────────────────────────────────────────────────────────────────────────────────────────────────────
# A workload is every client's questions in order, and the adapters that come and go.

Prompt: TypeAlias = "str | array[int]"  # quoted: arrays have no parameter at run time


@dataclass(frozen=True, slots=True)
class Question:
    """One request to send. `at` counts from the start of the run."""

    request_id: RequestId
    at: float
    adapter_id: AdapterId  # BASE, or the position of the adapter's name in the workload's `names`, counted from 1
    prompt: Prompt
    output_tokens: int
    leaves_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClientQuestions:
    """One client's questions in order. With `max_concurrency`, the next waits until fewer than that are open."""

    questions: tuple[Question, ...]
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Transient:
    """An adapter that is loaded for one question and unloaded after `stays_s`."""

    host: AdapterId
    question: Question
    stays_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Every question of a benchmark. `names[n - 1]` is the name of adapter n."""

    title: str
    clients: tuple[ClientQuestions, ...]
    names: tuple[str, ...] = ()
    transients: tuple[Transient, ...] = ()

    @property
    def requests(self) -> int:
        return sum(len(client.questions) for client in self.clients) + len(self.transients)

    @property
    def transient_id(self) -> AdapterId:
        """One id for all transients together: the number after the last adapter's."""
        return AdapterId(len(self.names) + 1)

    def name_of(self, adapter_id: AdapterId) -> str:
        if adapter_id == BASE:
            return BASE_LABEL
        return "transients" if adapter_id == self.transient_id else self.names[adapter_id - 1]


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Prompts of a given length are made from a seed, so that every server gets the same ones.

# With a space before it, each word is a single token in the vocabularies of GPT (50k, 100k, 200k), Mistral (32k and
# 131k) and SmolLM2. So a text of N words has N tokens, and one more where a tokenizer puts its own at the beginning.
_WORDS = """
the of and to in is that it for was on are as with his they at be this from have or by one had not but what all
were when we there can an your which their if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made
over did down only way find use may water long little very after words called just where most know get through
back much before go good new write our used me man too any day same right look think also around another came
come work three word must because does part even place well such here take why things help put years different
away again off went old number great tell men say small every found still between name should home big give air
line set own under read last never us left end along while might next sound below saw something thought both
few those always looked show large often together asked house world going want school important until form
food keep children feet land side without boy once animals life enough took sometimes four head above kind
began almost live page got earth need far hand high year mother light parts country father let night following
picture being study second eyes soon times story boys since white days ever paper hard near sentence better
best across during today others however sure means knew try told young miles sun ways thing whole hear example
heard several change answer room sea against top turned learn point city play toward five using himself usually
"""

WORDS = tuple(_WORDS.split())
FIRST = "the"  # a single token also without a space before it, unlike some of the words


def random_text(dice: random.Random, words: int) -> str:
    return " ".join([FIRST, *dice.choices(WORDS, k=words - 1)])


def random_ids(dice: random.Random, tokens: int, vocab_size: int) -> array[int]:
    """Random token ids, without the lowest tenth of the vocabulary: it holds the control tokens."""
    return array("I", dice.choices(range(vocab_size // 10, vocab_size), k=tokens))


# ── making ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Questions come from flags, from a scenario or from a trace.

RANDOM_PROMPTS = 1000


def read_workload(config: BenchConfig, listed: Sequence[str] = ()) -> Workload:
    """The workload of a config. `listed` names the server's adapters, for a scenario without adapter names."""
    match config.source:
        case "scenario":
            return _scenario(config, listed)
        case "trace":
            return _trace(config)
    return _random(config)


def warmups(config: BenchConfig) -> list[Question]:
    """Short questions that are in no workload, so that a server's prefix cache gains nothing from them."""
    dice = random.Random(f"warm-up {config.seed}")
    return [
        Question(RequestId(f"warm-up-{number}"), 0.0, BASE, random_ids(dice, 16, config.vocab_size), 8)
        for number in range(config.warmup_requests)
    ]


def _random(config: BenchConfig) -> Workload:
    client = Client(
        requests=config.num_prompts or RANDOM_PROMPTS,
        rate_per_s=config.request_rate or math.inf,
        prompt_tokens=_range(config.random_input_len, config.random_range_ratio),
        output_tokens=_range(config.random_output_len, config.random_range_ratio),
        adapters=len(config.lora_name),
        distribution=config.lora_request_distribution,
        skew=config.lora_zipf_alpha,
        base_share=config.base_share,
        cancel_share=config.cancel_share,
        cancel_within_s=config.cancel_within_s,
    )
    rate = "all at once" if config.request_rate in (None, math.inf) else f"{config.request_rate:g}/s"
    return Workload(f"{config.dataset_name}, {rate}", (_client_questions(config, 0, client),), config.lora_name)


def _range(longest: int, ratio: float) -> tuple[int, int]:
    return max(1, int(longest * ratio)), longest


def _scenario(config: BenchConfig, listed: Sequence[str]) -> Workload:
    assert config.scenario is not None
    scenario = read_scenario(Path(config.scenario))
    if scenario.only_simulated:
        raise ConfigError(
            f"{scenario.name} has {', '.join(scenario.only_simulated)}, which only 'rota simulate' can do: a server "
            "takes priorities from its keys and ends answers where its model does, and a transient adapter is asked "
            "once here; leave these fields out."
        )
    names = tuple(config.lora_name or listed)[: scenario.adapters]
    if len(names) < scenario.adapters:
        source = "--lora-name has" if config.lora_name else "the server lists"
        raise ConfigError(f"{scenario.name} asks for {scenario.adapters} adapters; {source} {len(names)}.")
    clients = [_with_overrides(config, client) for client in scenario.clients]
    clients_questions = tuple(_client_questions(config, number, client) for number, client in enumerate(clients))
    workload = Workload(scenario.name, clients_questions, names)
    return replace(workload, transients=tuple(_transients(config, scenario, workload.transient_id)))


def _with_overrides(config: BenchConfig, client: Client) -> Client:
    """A scenario's client, with the values that the command line gives."""
    if config.num_prompts is not None:
        client = replace(client, requests=config.num_prompts)
    if config.request_rate is not None and client.rate_per_s is not None:
        client = replace(client, rate_per_s=config.request_rate)
    return client


def _client_questions(config: BenchConfig, number: int, client: Client) -> ClientQuestions:
    # The simulator uses the same seeds, so it sees the same arrivals.
    wave = asks(client, seed=config.seed * 1000 + number)
    questions = tuple(_question(config, f"{number}-{ask.number:07d}", ask, f"prefix {number}") for ask in wave)
    return ClientQuestions(questions, config.max_concurrency or client.concurrency)


def _transients(config: BenchConfig, scenario: Scenario, transient_id: AdapterId) -> Iterator[Transient]:
    for visit in visits(scenario, config.seed):
        (ask,) = visit.asks
        question = _question(config, f"transient-{visit.number:07d}", replace(ask, at=visit.at), "prefix")
        yield Transient(visit.host, replace(question, adapter_id=transient_id), visit.stays_s)


def _question(config: BenchConfig, name: str, ask: Arrival, prefix: str) -> Question:
    """`prefix` names the beginning that the client's prompts share."""
    shared, own = ask.shared_tokens, ask.prompt_tokens - ask.shared_tokens
    prompt: Prompt
    if shared:
        # Its own random generator again: a longer prefix begins with the tokens of a shorter one.
        prompt = random_ids(random.Random(f"{config.seed} {prefix}"), shared, config.vocab_size)
        prompt += random_ids(random.Random(f"{config.seed} {name}"), own, config.vocab_size)
    else:
        prompt = _prompt(config, name, own)
    return Question(RequestId(name), ask.at, ask.adapter_id, prompt, ask.output_tokens, ask.leaves_after_s)


def _prompt(config: BenchConfig, name: str, tokens: int) -> Prompt:
    """Each request has its own random generator, so that its prompt does not depend on earlier requests."""
    dice = random.Random(f"{config.seed} {name}")
    if config.source == "random":
        return random_text(dice, tokens)
    return random_ids(dice, tokens, config.vocab_size)


# ── trace ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A trace is recorded traffic: a line of JSON for every request.
#
# {"at": 0.25, "prompt_tokens": 120, "output_tokens": 64, "adapter": "pirate"}
# {"at": 0.31, "prompt": "The capital of France is", "output_tokens": 8}


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: `at` counts from the start; a request without an adapter asks the base model."""

    at: float
    output_tokens: int
    prompt: str | list[int] | None = None
    prompt_tokens: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise ValueError("a line has either prompt or prompt_tokens, and not both")
        if self.prompt is not None and not self.prompt:
            raise ValueError("prompt must not be empty")
        if self.at < 0.0:
            raise ValueError(f"at must not be below 0, not {self.at}")
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


def read_trace(path: Path) -> list[TraceLine]:
    """Every request of a trace in order of time; errors name the number of the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.") from error
    numbered = enumerate(lines, start=1)
    found = [_decode(line, f"{path}, line {number}") for number, line in numbered if line.strip()]
    if not found:
        raise ConfigError(f"{path} is empty, so there would be no requests.")
    return sorted(found, key=lambda line: line.at)


def _decode(line: bytes, place: str) -> TraceLine:
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: {error}.") from error


_DECODER = msgspec.json.Decoder(TraceLine)


def _trace(config: BenchConfig) -> Workload:
    assert config.dataset_path is not None
    path = Path(config.dataset_path)
    lines = read_trace(path)
    names = tuple(sorted({line.adapter for line in lines if line.adapter is not None}))
    asked = islice(enumerate(lines), config.num_prompts)
    questions = tuple(_traced(config, number, line, names) for number, line in asked)
    return Workload(path.stem, (ClientQuestions(questions, config.max_concurrency),), names)


def _traced(config: BenchConfig, number: int, line: TraceLine, names: tuple[str, ...]) -> Question:
    name = f"0-{number:07d}"
    adapter = BASE if line.adapter is None else AdapterId(1 + names.index(line.adapter))
    prompt: Prompt
    if line.prompt_tokens is not None:
        prompt = _prompt(config, name, line.prompt_tokens)
    else:
        prompt = line.prompt if isinstance(line.prompt, str) else array("I", line.prompt or ())
    return Question(RequestId(name), line.at, adapter, prompt, line.output_tokens)
