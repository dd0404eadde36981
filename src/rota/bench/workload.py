"""A workload is everything a benchmark will ask, question by question."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

from rota.core.adapter import BASE_LABEL
from rota.core.ids import BASE, AdapterId, RequestId

Prompt: TypeAlias = "str | array[int]"  # quoted: arrays have no parameter at run time


@dataclass(frozen=True, slots=True)
class Question:
    """One request to come; `at` counts from the start."""

    request_id: RequestId
    at: float
    adapter_id: AdapterId  # BASE, or the place of its name in a workload's `names`, from 1
    prompt: Prompt
    output_tokens: int
    leaves_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Crowd:
    """One client's questions in order; with `at_once`, the next one waits until fewer than so many are open."""

    questions: tuple[Question, ...]
    at_once: int | None = None


@dataclass(frozen=True, slots=True)
class Transient:
    """An adapter that is loaded to be asked once, and told to go after `stays_s`."""

    host: AdapterId
    question: Question
    stays_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything a benchmark will ask; `names[n - 1]` is the adapter n."""

    title: str
    crowds: tuple[Crowd, ...]
    names: tuple[str, ...] = ()
    transients: tuple[Transient, ...] = ()

    @property
    def requests(self) -> int:
        return sum(len(crowd.questions) for crowd in self.crowds) + len(self.transients)

    @property
    def transient_id(self) -> AdapterId:
        """All transients are counted together, after the last adapter."""
        return AdapterId(len(self.names) + 1)

    def name_of(self, adapter: AdapterId) -> str:
        if adapter == BASE:
            return BASE_LABEL
        return "transients" if adapter == self.transient_id else self.names[adapter - 1]
