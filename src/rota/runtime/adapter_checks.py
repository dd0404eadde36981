"""Adapters that are read later are checked before the scheduler hears of them, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message

# A check waits for a disk more than it computes: a network disk answers in some milliseconds.
THREADS = 8
# Headers are small; a disk that has not given them after this time has failed.
TIMEOUT_S = 120.0
# Checks that a start waits for: a third of a millisecond each, and more with a network disk.
MOST_CHECKED = 500


class AdapterChecks:
    """For the loop's thread, which waits for the checks: they come at a start, before anything is served.

    An adapter that a former engine had is not checked: a bad one must not hold up a restart, and is found when it is
    read. So are the adapters beyond the first hundreds, of which a start would take many seconds.
    """

    def __init__(self, check: Callable[[Adapter], str], timeout_s: float = TIMEOUT_S, most: int = MOST_CHECKED) -> None:
        self._check = check
        self._timeout_s = timeout_s
        self._left = most

    def sift(self, messages: list[Message]) -> list[Message]:
        """The same messages; those of bad adapters say why they are refused."""
        unchecked = [one.adapter for one in messages if isinstance(one, AddAdapter) and _is_unchecked(one)]
        if not unchecked:
            return messages  # nearly every call
        refusals = self._refusals(unchecked[: self._left])
        self._left -= min(self._left, len(unchecked))
        return [_judged(message, refusals) for message in messages]

    def _refusals(self, adapters: Iterable[Adapter]) -> dict[AdapterId, str]:
        pool = ThreadPoolExecutor(THREADS, "adapter-check")
        checks = {adapter.adapter_id: (adapter, pool.submit(self._check, adapter)) for adapter in adapters}
        wait([check for _, check in checks.values()], self._timeout_s)
        pool.shutdown(wait=False, cancel_futures=True)  # a thread that waits for a broken disk may never end
        return {adapter_id: self._said(adapter, check) for adapter_id, (adapter, check) in checks.items()}

    def _said(self, adapter: Adapter, check: Future[str]) -> str:
        if check.done() and not check.cancelled():
            return check.result()
        return f"Adapter '{adapter.name}' could not be read from {adapter.path} within {self._timeout_s:g} seconds."


def _is_unchecked(message: AddAdapter) -> bool:
    return message.is_read_later and not message.is_known and not message.refusal


def _judged(message: Message, refusals: dict[AdapterId, str]) -> Message:
    if isinstance(message, AddAdapter) and (refusal := refusals.get(message.adapter.adapter_id)):
        return replace(message, refusal=refusal)
    return message
