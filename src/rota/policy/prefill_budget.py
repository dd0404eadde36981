"""The prefill budget says which prompts share a step's tokens when those that have begun do not fit into the step.

Short rests go first, and a quarter of the step stays for newcomers. A newcomer may start before its turn if it is at
most half as long as the shortest rest that goes on after this step. So few prompts are ever begun at a time (each at
most half as long as the one before), and prompts that wait behind a long one hold no KV.

Ageing bounds the long ones. Only the oldest prompt has to be guarded, because every prompt becomes the oldest in turn.
Others may overtake it by a quarter of its length, at any speed. From then on it goes first, and only the newcomers'
quarter of each step goes to others. So a prompt of n tokens waits for at most n/4 + n/3 tokens of younger prompts while
it is the oldest, and one step. The oldest of a higher priority than others goes first at once.

A token behind a long prefix takes longer. So such chunks are shorter while requests with short prompts are open: their
tokens take at most a third longer than those of a step of prompts that begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rota.core.ids import RequestId

# One part in this many: of a step for newcomers, and of a prompt's length that others may overtake it by.
PART = 4
# The most work of a step's prompts, in steps full of tokens without a prefix: a step becomes as much longer as a prompt
# that yields the newcomers' part of each step.
MOST_WORK = PART / (PART - 1)
# How much shorter than the prompts that have begun a prompt must be to start before its turn.
SHORTER = 2


class PromptView(Protocol):
    """A prompt that has begun."""

    @property
    def length(self) -> int: ...

    @property
    def rest(self) -> int:
        """Tokens that are not planned yet."""
        ...

    @property
    def arrival(self) -> tuple[float, RequestId]:
        """When it came, earlier for a higher priority."""
        ...

    @property
    def priority(self) -> int: ...

    @property
    def yielded(self) -> int:
        """Tokens by which younger prompts have overtaken it while it was the oldest."""
        ...


Prompt = TypeVar("Prompt", bound=PromptView)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSplit(Generic[Prompt]):
    """How prompts that have begun share a step with newcomers."""

    first: list[tuple[Prompt, int]]  # prompts before all newcomers, with the tokens that each gets
    then: list[Prompt]  # prompts that share what newcomers leave, in this order
    oldest: Prompt
    longest_newcomer: int  # a longer newcomer waits for its turn
    priority: int  # unless its priority is higher than this

    def lets_in(self, newcomer: Prompt) -> bool:
        """May a newcomer start before its turn?"""
        return newcomer.length <= self.longest_newcomer or newcomer.priority > self.priority


def newcomers_part(budget: int) -> int:
    """Tokens of a step that stay for newcomers."""
    return budget // PART


def work_of(tokens: int, start: int, deep_prefix: float) -> float:
    """What a chunk behind `start` tokens takes, in tokens without a prefix; at `deep_prefix` a token counts double."""
    return tokens * (1.0 + start / deep_prefix)


def most_tokens(work: float, start: int, deep_prefix: float) -> int:
    """The longest chunk behind `start` tokens that takes at most this much work."""
    return int(work / (1.0 + start / deep_prefix))


def split(prompts: Sequence[Prompt], budget: int, lowest_priority: int = 0) -> PrefillSplit[Prompt]:
    """Share `budget` tokens between prompts that have begun, of which it cannot hold all rests.

    `lowest_priority` is the lowest of all open requests.
    """
    oldest = min(prompts, key=lambda prompt: prompt.arrival)
    by_size = sorted(prompts, key=lambda prompt: (-prompt.priority, prompt.rest, prompt.arrival))
    left = budget - newcomers_part(budget)
    first: list[tuple[Prompt, int]] = []
    if is_aged(oldest) or oldest.priority > lowest_priority:
        first.append((oldest, min(oldest.rest, left)))
        left -= first[0][1]
    for prompt in by_size:
        if first and prompt is first[0][0]:
            continue
        if prompt.rest > left:
            break
        first.append((prompt, prompt.rest))
        left -= prompt.rest
    given = {id(prompt): tokens for prompt, tokens in first}
    going_on = [prompt for prompt in by_size if given.get(id(prompt), 0) < prompt.rest]
    return PrefillSplit(
        first=first,
        then=going_on,
        oldest=oldest,
        longest_newcomer=min((prompt.rest for prompt in going_on), default=budget) // SHORTER,
        priority=max((prompt.priority for prompt in going_on), default=lowest_priority),
    )


def is_aged(prompt: PromptView) -> bool:
    """Have others overtaken it by so much that it goes first?"""
    return prompt.yielded * PART >= prompt.length
