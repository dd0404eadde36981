"""Adapters that are read later are checked before anybody hears of them; all others go by untouched."""

from __future__ import annotations

import threading
from dataclasses import replace

from rota.core.adapter import Adapter
from rota.runtime.live import AdapterChecks
from tests.builders import abort, add_adapter, submit
from tests.waiting import TIMEOUT_S


def refuse_two(adapter: Adapter) -> str:
    return "It is bad." if adapter.adapter_id == 2 else ""


def later(number: int, **fields: bool):
    return replace(add_adapter(number), is_read_later=True, **fields)


def test_a_bad_one_is_marked_and_the_order_stays():
    messages = [later(1), submit("a"), later(2), abort("a"), later(3)]

    assert AdapterChecks(refuse_two).sift(messages) == [
        messages[0],
        messages[1],
        replace(later(2), refusal="It is bad."),
        *messages[3:],
    ]


def test_what_is_read_at_once_or_was_known_before_is_not_checked():
    messages = [add_adapter(2), later(2, is_known=True)]
    assert AdapterChecks(refuse_two).sift(messages) is messages


def test_a_disk_that_hangs_is_given_up_on_and_the_others_are_known():
    ends = threading.Event()

    def hang_at_two(adapter: Adapter) -> str:
        return str(ends.wait(TIMEOUT_S)) if adapter.adapter_id == 2 else ""

    first, second = AdapterChecks(hang_at_two, timeout_s=0.2).sift([later(1), later(2)])
    ends.set()

    assert first == later(1)
    assert second.refusal == "Adapter 'adapter2' could not be read from adapters/2 within 0.2 seconds."


def test_a_start_waits_for_some_checks_and_not_for_thousands():
    checked: list[int] = []

    def note(adapter: Adapter) -> str:
        checked.append(adapter.adapter_id)
        return ""

    checks = AdapterChecks(note, most=3)
    for messages in ([later(1), later(2)], [later(3), later(4)], [later(5)]):
        assert checks.sift(messages) == messages
    assert sorted(checked) == [1, 2, 3]
