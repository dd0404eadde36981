"""Admission reserves what a call may take, refuses a call that meets a limit, and settles at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.access.keys import Key
from rota.server.access.limits import Ask, Hold, Limit, Limits, Met
from rota.server.errors import RetryLater

# Called with the name of the key, the limit that a call has met, and the time.
OnMet = Callable[[str, str, float], None]


class Admission:
    """The limits of all keys, at the time that it is now."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = Limits()
        self._now = now
        self._on_met: OnMet = lambda _key, _limit, _at: None

    def watch(self, on_met: OnMet) -> None:
        self._on_met = on_met

    def enter(self, key: Key) -> None:
        """Count a call as one request. Raises RATE_LIMITED, with the time to wait, if the minute is used up."""
        if met := self._limits.enter(key, self._now()):
            raise self._refusal(key, met, f"Key '{key.name}' may have {_described(key, met.limit)}")

    def admit(self, key: Key, ask: Ask, output_param: str | None, prompt_param: str) -> Hold:
        """Reserve what a call may take. The caller settles it.

        Raises RATE_LIMITED if the call does not fit now, and BAD_FIELD if it never does. `output_param` is the field
        with the client's limit of output tokens, if there is one.
        """
        admitted = self._limits.admit(key, ask, self._now())
        if isinstance(admitted, Hold):
            return admitted
        if admitted.wait_s is None:
            self._on_met(key.name, admitted.limit.value, self._now())
            raise _never(key, ask, admitted, output_param, prompt_param)
        asks = f"asks for {admitted.needed}" if admitted.limit is Limit.REQUESTS else f"reserves {admitted.needed}"
        limit = _described(key, admitted.limit)
        raise self._refusal(key, admitted, f"Key '{key.name}' may have {limit}, and this call {asks}")

    def settle(self, hold: Hold, used: int) -> None:
        """Give back what a call has not used. A second call changes nothing."""
        hold.settle(used, self._now())

    def charge(self, key: Key, tokens: int) -> None:
        """Count tokens of a call that reserves nothing, once they are known."""
        self._limits.charge(key, tokens, self._now())

    def _refusal(self, key: Key, met: Met, reason: str) -> RequestError:
        self._on_met(key.name, met.limit.value, self._now())
        wait_s = met.wait_s or 1
        again = "when an open answer has ended" if met.limit is Limit.IN_FLIGHT else f"in {wait_s} seconds"
        return RetryLater(Fault(FaultCode.RATE_LIMITED, f"{reason}; come back {again}."), wait_s)


def _described(key: Key, limit: Limit) -> str:
    match limit:
        case Limit.REQUESTS:
            return f"{key.requests_per_minute} requests a minute"
        case Limit.TOKENS:
            return f"{key.tokens_per_minute} tokens a minute"
        case Limit.IN_FLIGHT:
            return f"{key.max_tokens_in_flight} tokens in flight (max_tokens_in_flight)"
        case Limit.QUEUE:
            return f"{key.max_running} answers running (max_running) and {key.max_queued} waiting (max_queued)"


def _never(key: Key, ask: Ask, met: Met, output_param: str | None, prompt_param: str) -> RequestError:
    """A sentence without a time to come back: the same call would be refused again."""
    most = f"Key '{key.name}' may have {_described(key, met.limit)}, so this call can never be served"
    if met.limit in (Limit.REQUESTS, Limit.QUEUE):
        param, advice = prompt_param, "send fewer prompts at once, or lower n"
        taken = f"This call asks for {ask.answers} answers."
    elif output_param is None:
        param, advice = prompt_param, "send a shorter prompt"
        taken = f"This call has {ask.prompt_tokens} prompt tokens."
    else:
        param, advice = output_param, f"lower {output_param}, or send fewer or shorter prompts"
        taken = f"This call has {ask.prompt_tokens} prompt tokens and may have {ask.output_tokens} output tokens."
    return RequestError.bad_field(param, f"{taken} {most}; {advice}.")
