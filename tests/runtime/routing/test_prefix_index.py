from __future__ import annotations

from rota.core.ids import AdapterId
from rota.core.request import Request
from rota.runtime.replicas.router import ENDS, PrefixIndex
from tests.builders import request
from tests.counting import calls_in

TEXT = tuple(range(3, 3 + 5000))


def seen(index: PrefixIndex, asked: Request, replicas: int = 3) -> list[int]:
    """How many tokens of a prompt each replica has seen."""
    found = index.seen(index.keys_of(asked), replicas)
    return [0] * replicas if found is None else [int(tokens) for tokens in found]


def note(index: PrefixIndex, asked: Request, replica: int) -> None:
    index.note(index.keys_of(asked), replica)


def test_a_replica_is_known_by_the_longest_beginning_it_has_seen():
    index = PrefixIndex()
    note(index, request(prompt=TEXT[:300]), 1)
    note(index, request(prompt=(*TEXT[:130], *range(9000, 9400))), 2)

    assert seen(index, request(prompt=TEXT[:1000])) == [0, 256, 128]


def test_adapters_and_cache_scopes_share_no_beginnings():
    index = PrefixIndex()
    note(index, request(prompt=TEXT[:300]), 1)

    assert seen(index, request(prompt=TEXT[:300], adapter=AdapterId(1))) == [0, 0, 0]
    assert seen(index, request(prompt=TEXT[:300], cache_scope="acme")) == [0, 0, 0]
    assert seen(index, request(prompt=TEXT[:63])) == [0, 0, 0]


def test_a_replica_that_lost_its_kv_has_seen_nothing_and_the_others_have():
    index = PrefixIndex()
    for replica in (0, 1):
        note(index, request(prompt=TEXT[:300]), replica)
    index.forget(0)

    assert seen(index, request(prompt=TEXT[:300])) == [0, 256, 0]


def test_the_index_is_bounded_and_forgets_first_what_was_not_asked_for_longest():
    index = PrefixIndex(most=6)
    for first in (1, 2, 3, 1, 4):
        note(index, request(prompt=(first, *TEXT[:127])), 0)

    assert len(index) == 6
    assert [seen(index, request(prompt=(first, *TEXT[:127])))[0] for first in (1, 2, 3, 4)] == [128, 0, 128, 128]


def test_a_long_prompt_is_hashed_no_further_than_the_last_end():
    index = PrefixIndex()
    short, long = (request(prompt=tuple(range(3, 3 + tokens))) for tokens in (ENDS[-1], 100_000))

    assert index.keys_of(short) == index.keys_of(long)
    assert calls_in(lambda: index.keys_of(long))[0] <= 10
