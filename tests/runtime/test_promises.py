from __future__ import annotations

from dataclasses import replace

from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Admitted,
    Finished,
    FinishReason,
    HostChanged,
    HostState,
)
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import RemoveAdapter, SealAdapter
from rota.runtime.promises import Promises
from tests.builders import add_adapter, submit

ONE = AdapterId(1)


def known(promises: Promises) -> list[AdapterId]:
    return [message.adapter.adapter_id for message in promises.introductions()]


def test_whoever_is_open_when_the_engine_goes_hears_of_it_once():
    promises = Promises()
    for message in (submit("a"), submit("b"), add_adapter(1), RemoveAdapter(adapter_id=AdapterId(2), at=0.0)):
        promises.note_message(message)
    promises.note_events([Finished(request_id=RequestId("a"), at=1.0, reason=FinishReason.STOP)])
    finished, refused, removed = promises.break_all("The engine is gone.")

    assert (finished.request_id, finished.fault.message) == ("b", "The engine is gone.")
    assert (refused.adapter_id, refused.reason) == (1, "The engine is gone.")
    assert isinstance(removed, AdapterRemoved)
    assert removed.adapter_id == 2
    assert promises.break_all("Again.") == []


def test_the_end_of_a_lost_request_says_how_long_its_prompt_was_and_what_was_cached_of_it():
    promises = Promises()
    promises.note_message(submit("admitted", prompt=40))
    promises.note_message(submit("waiting", prompt=7))
    # It was preempted once, and then found its own answer in the cache.
    promises.note_events(
        [
            Admitted(request_id=RequestId("admitted"), at=at, cached_tokens=cached)
            for at, cached in ((1.0, 16), (2.0, 48))
        ]
    )
    admitted, waiting = promises.break_all("The engine is gone.")

    assert (admitted.prompt_tokens, admitted.cached_tokens) == (40, 16)
    assert (waiting.prompt_tokens, waiting.cached_tokens) == (7, 0)


def test_adapters_with_open_requests_are_introduced_first_and_read_later():
    promises = Promises()
    for number in (1, 2, 3):
        promises.note_message(add_adapter(number))
        promises.note_events([AdapterAdded(AdapterId(number), 1.0)])
    promises.note_message(submit("open", adapter=AdapterId(3)))

    assert known(promises) == [3, 1, 2]
    assert all(message.is_read_later and message.is_known for message in promises.introductions())


def test_an_adapter_is_introduced_once_it_was_added():
    promises = Promises()
    promises.note_message(add_adapter(1))
    assert known(promises) == []
    promises.note_events([AdapterAdded(ONE, 1.0)])

    assert known(promises) == [1]
    promises.break_all("The engine is gone.")
    promises.note_events([AdapterAdded(ONE, 2.0)])
    assert known(promises) == [1]


def test_an_adapter_is_not_introduced_again_once_it_is_to_be_removed():
    promises = Promises()
    promises.note_message(add_adapter(1))
    promises.note_events([AdapterAdded(ONE, 1.0)])
    promises.note_message(RemoveAdapter(adapter_id=ONE, at=2.0))

    assert known(promises) == []


def test_an_adapter_that_was_to_be_removed_while_it_was_read_is_not_introduced():
    promises = Promises()
    promises.note_message(add_adapter(1))
    promises.note_message(RemoveAdapter(adapter_id=ONE, at=0.5))
    promises.note_events([AdapterAdded(ONE, 1.0), AdapterRemoved(ONE, 1.0)])

    assert known(promises) == []
    assert promises.break_all("The engine is gone.") == []


def test_an_adapter_that_a_new_engine_refuses_is_introduced_to_the_next_until_it_is_removed():
    promises = Promises()
    promises.note_message(add_adapter(1))
    gone = AdapterRefused(adapter_id=ONE, at=2.0, reason="Its folder is gone.")
    promises.note_events([AdapterAdded(ONE, 1.0), gone])
    assert known(promises) == [1]

    promises.note_message(RemoveAdapter(adapter_id=ONE, at=3.0))
    promises.note_events([gone])  # the engine does not know it
    assert known(promises) == []
    assert promises.break_all("The engine is gone.") == []


def test_an_adapter_that_was_never_added_is_not_introduced():
    promises = Promises()
    promises.note_message(add_adapter(1))
    promises.note_events([AdapterRefused(adapter_id=ONE, at=1.0, reason="It is broken.")])

    assert known(promises) == []


def test_an_adapter_that_others_serve_is_introduced_to_every_new_engine_also_before_one_has_read_it():
    promises = Promises()
    promises.note_message(replace(add_adapter(1), is_known=True))

    assert promises.break_all("The engine is gone.") == []
    assert known(promises) == [1]
    promises.note_events([AdapterRefused(adapter_id=ONE, at=1.0, reason="It cannot be read.")])
    assert known(promises) == [1]
    promises.note_message(RemoveAdapter(adapter_id=ONE, at=2.0))
    assert known(promises) == []


def test_the_next_engine_is_told_what_the_first_read_of_each_version_has_found():
    promises = Promises()
    for number in (1, 2, 3):
        promises.note_message(add_adapter(number))
        promises.note_events([AdapterAdded(AdapterId(number), 1.0)])
    for seals in (("first",), ("later",)):
        promises.note_events([HostChanged(at=1.0, adapter_id=ONE, state=HostState.HELD, seals=seals)])
    promises.note_message(SealAdapter(AdapterId(2), 1.0, ("of another engine",)))

    told = [message.adapter.seals for message in promises.introductions()]
    assert told == [("first",), ("of another engine",), ()]


def test_what_is_read_is_known_until_it_is_read_also_if_it_leaves_meanwhile():
    promises = Promises()
    for number in (1, 2):
        promises.note_message(add_adapter(number))
    reading = [HostChanged(at=0.0, adapter_id=AdapterId(number), state=HostState.READING) for number in (1, 2)]
    promises.note_events(reading)
    promises.note_events([AdapterAdded(AdapterId(1), 0.0)])
    promises.note_message(RemoveAdapter(adapter_id=AdapterId(1), at=0.0))
    assert [one.adapter_id for one in promises.reading] == [1, 2]
    promises.note_events([HostChanged(at=0.0, adapter_id=AdapterId(2), state=HostState.HELD)])
    assert [one.adapter_id for one in promises.reading] == [1]
    promises.break_all("It died.")
    assert promises.reading == []
