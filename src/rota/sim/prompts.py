"""Prompts of the simulator are numbers: no two are alike, except where a client's prompts share their first tokens."""

from __future__ import annotations

from rota.workload.arrivals import Ask


class Prompts:
    """Prompts share their numbers, so that a day of traffic fits into memory.

    client 2, request 7    prefix of client 2 | the request's own number | 5 6 7 …
    """

    def __init__(self, longest: int, clients: int) -> None:
        self._numbers = tuple(range(longest))
        self._clients = clients

    def prompt(self, client: int, ask: Ask) -> tuple[int, ...]:
        """`client` is any number below the number of clients; all its prompts share the same prefix."""
        first_free, numbers = len(self._numbers), self._numbers
        own = first_free + (1 + ask.number) * self._clients + client
        if not ask.shared_tokens:
            return (own, *numbers[1 : ask.prompt_tokens])
        prefix = (first_free + client, *numbers[1 : ask.shared_tokens])
        rest = numbers[ask.shared_tokens + 1 : ask.prompt_tokens]
        return prefix if ask.prompt_tokens == ask.shared_tokens else (*prefix, own, *rest)
