"""A workload holds every question that a benchmark sends."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

from rota.core.adapter import BASE_LABEL
from rota.core.ids import BASE, AdapterId, RequestId

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
