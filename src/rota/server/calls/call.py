"""A call is what a body asks for, after its checks; a dialect's own call adds what its writer needs."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.errors import Fault
from rota.core.request import Pooling, SamplingParams
from rota.server.calls.prompts import CallPrompts
from rota.text.speech import ALL_IS_CONTENT, Speech
from rota.text.stream import PLAIN_TEXT, TextOptions

# Fields, and the names of models that they hold. No name: the base model.
AskedModels = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Who shall answer: a model, or an adapter beside it. `param` is the field that names who it is."""

    model: str | None = None
    lora_path: str | None = None
    param: str = "model"

    @classmethod
    def of(cls, model: str | None, lora_path: str | None) -> ModelNames:
        """As the fields of OpenAI's routes name them."""
        return cls(model, lora_path, "lora_path" if lora_path else "model")

    @property
    def asked(self) -> AskedModels:
        """Every field that names one."""
        return (("model", self.model), *(((self.param, self.lora_path),) if self.lora_path else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """It is small, however long its conversation is, because it travels between processes."""

    prompts: CallPrompts
    # One for all prompts, or one for each.
    models: tuple[ModelNames, ...] = (ModelNames(),)
    samplings: tuple[SamplingParams, ...]
    # How many answers each prompt gets. The answers of one prompt stand side by side.
    choices: int = 1
    is_streamed: bool = False
    # Of a call that wants vectors.
    pooling: Pooling | None = None
    # Whether the client wants output tokens. False if only prompts are scored.
    has_output: bool = True
    # Whether the text continues its prompt. False for an answer in a chat.
    is_continuation: bool = True
    # Which parts of an answer are text, and how the text is sorted.
    text: TextOptions = PLAIN_TEXT
    speech: Speech = ALL_IS_CONTENT
    # Whether each token is sorted by itself, because those of thoughts are counted.
    counts_thoughts: bool = False
    # The client's field that limits the output. None: the client set no limit.
    limit_param: str | None = None
    cache_salt: str | None = None
    # Who asks, as the client says: a traffic route sends the same asker to the same target.
    asker: str | None = None
    # A higher one goes first. None: the key's own.
    priority: int | None = None
    # The client's own name for the call, and the field that holds it.
    name: str | None = None
    name_param: str = "request_id"
    # Fields of the body that changed nothing, by their names.
    ignored: tuple[str, ...] = ()
    # Why it is refused, where its name is known all the same.
    fault: Fault | None = None

    @property
    def asked_models(self) -> AskedModels:
        """The models that it names; none if it is refused."""
        return () if self.fault else tuple(one for names in self.models for one in names.asked)

    def models_of(self, prompt: int) -> ModelNames:
        return self.models[prompt % len(self.models)]

    def sampling_of(self, prompt: int) -> SamplingParams:
        return self.samplings[prompt % len(self.samplings)]

    def request_name(self, answer_id: str, prompt: int, choice: int) -> str:
        """A single request has the answer's name."""
        is_single = len(self.prompts.tokens) * self.choices == 1
        return answer_id if is_single else f"{answer_id}-{prompt}-{choice}"
