"""The balance asserts that the books agree with one another; tests ask for it after every step."""

from __future__ import annotations

from collections import Counter

from rota.core.ids import BASE
from rota.scheduler.books import Books
from rota.scheduler.group import Group, arrival
from rota.scheduler.sequence import Sequence


def check_balance(books: Books) -> None:
    """Assert that everything is accounted for: rows, blocks, slots, sequences, users."""
    running = list(books.running())
    assert len(running) == sum(group.running for group in books.groups.values()), "a running sequence is not seen"
    books.blocks.check(sequence.held_blocks for sequence in running)
    books.slots.check()
    assert len(running) == books.running_count, "a seat is lost"
    _check_rows(books, running)
    _check_accounts(books, running)
    waiting = [sequence for group in books.groups.values() for sequence in group.queue]
    assert len(waiting) == books.waiting
    assert books.short_prompts == sum(map(books.is_short, books.sequences.values()))
    assert books.priorities == Counter(sequence.request.priority for sequence in books.sequences.values())
    assert {*map(id, books.sequences.values())} == {*map(id, running), *map(id, waiting)}
    assert books.pinned_groups == {a: group for a, group in books.groups.items() if group.is_pinned}
    unused = Group(None)
    written = unused.users or unused.tenants.main or unused.priorities or unused.lengths
    assert not written, "the books that unused adapters share are not empty"
    for group in books.groups.values():
        assert group.prefilling == sorted(group.prefilling, key=arrival)
        assert group.decoding == sorted(group.decoding, key=arrival)
        assert group.rowless == sorted(group.rowless, key=arrival)
        assert group.priorities == Counter(one.request.priority for one in group.running_sequences())
    absent = {a for a, g in books.groups.items() if g.wants_slot and a != BASE and a not in books.slots.residencies}
    assert absent == {group.adapter_id for group in books.absent}
    assert [*books.absent] == sorted(books.absent, key=lambda group: (books.due_at(group), group.adapter_id))
    assert [*books.absent.parked] == [group for group in books.absent if group.running]
    assert [*books.absent.at_hand] == [group for group in books.absent if books.hosts.has(group.adapter_id)]
    ready = [a for a, residency in books.slots.residencies.items() if residency.is_ready]
    assert [group.adapter_id for group in books.residents] == ready
    assert books.open_groups == [group for group in (books.base, *books.residents) if books.is_open(group)]


def _check_rows(books: Books, running: list[Sequence]) -> None:
    seated = [sequence for sequence in running if sequence.row is not None]
    assert len(seated) == books.rows.total - books.rows.free, "a row is lost or shared"
    assert len({sequence.row for sequence in seated}) == len(seated), "two sequences share a row"
    rowless = [sequence for group in books.groups.values() for sequence in group.rowless]
    assert all(sequence.row is None for sequence in rowless)
    books.group_sizes.check(
        [group.running for group in books.groups.values() if group.running and group is not books.base]
    )
    assert len(rowless) + len(seated) == len(running)
    books.rows.check({group.adapter_id: group.rows for group in books.absent.parked if group.rows})


def _check_accounts(books: Books, running: list[Sequence]) -> None:
    blocks: Counter[str] = Counter()
    for sequence in running:
        blocks[sequence.account.name] += len(sequence.held_blocks)
    rows = Counter(sequence.account.name for sequence in running if sequence.row is not None)
    seats = Counter(sequence.account.name for sequence in running)
    books.accounts.check(rows, seats, blocks, Counter(one.account.name for one in books.sequences.values()))
