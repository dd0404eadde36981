"""The balance asserts that queues and ledgers agree with one another; tests ask for it after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rota.core.ids import BASE, AdapterId, BlockId
from rota.scheduler import Scheduler
from rota.scheduler.accounts import Accounts
from rota.scheduler.adapter_state import Group, Standing, arrival
from rota.scheduler.blocks import BlockLedger
from rota.scheduler.rows import RowLedger
from rota.scheduler.sequence import Sequence
from rota.scheduler.slots import PageLedger, SlotLedger
from rota.scheduler.state import GroupSizes, SchedulerState


def check_balance(scheduler: Scheduler) -> None:
    """Assert that everything is accounted for: rows, blocks, slots, sequences, users."""
    state = scheduler._state
    running = list(state.running())
    assert len(running) == sum(group.running for group in state.groups.values()), "a running sequence is not seen"
    check_blocks(state.blocks, (sequence.held_blocks for sequence in running))
    check_slots(state.slots)
    assert len(running) == state.running_count, "a seat is lost"
    _check_rows(state, running)
    _check_accounts(state, running)
    waiting = [sequence for group in state.groups.values() for sequence in group.queue]
    assert len(waiting) == state.waiting
    assert state.short_prompts == sum(map(state.is_short, state.sequences.values()))
    assert state.priorities == Counter(sequence.request.priority for sequence in state.sequences.values())
    assert {*map(id, state.sequences.values())} == {*map(id, running), *map(id, waiting)}
    assert state.pinned_groups == {a: group for a, group in state.groups.items() if group.is_pinned}
    unused = Group(None, state.lengths)
    written = unused.users or unused.tenants or unused.priorities or unused.lengths
    assert not written, "the queues that unused adapters share are not empty"
    for group in state.groups.values():
        assert group.prefilling == sorted(group.prefilling, key=arrival)
        assert group.decoding == sorted(group.decoding, key=arrival)
        assert group.rowless == sorted(group.rowless, key=arrival)
        assert group.priorities == Counter(one.request.priority for one in group.running_sequences())
        assert group.running == len([*group.running_sequences()])
        assert group.waiting == len(group.queue)
    absent = {a for a, g in state.groups.items() if g.wants_slot and a != BASE and a not in state.slots.residencies}
    assert absent == {group.adapter_id for group in state.absent}
    assert [*state.absent] == sorted(state.absent, key=lambda group: (state.due_at(group), group.adapter_id))
    assert [*state.absent.parked] == [group for group in state.absent if group.running]
    assert state.slots._wanting == {one for one in absent if state.hosts.has(one)}
    assert [*state.absent.at_hand] == [group for group in state.absent if state.hosts.has(group.adapter_id)]
    to_read = {one.adapter_id for one in state.absent if one.standing is not Standing.NEW} - {*state.hosts.held}
    assert state.absent.missing == {one for one in to_read if not state.hosts.is_fetching(one)}
    ready = [a for a, residency in state.slots.residencies.items() if residency.is_ready]
    assert [group.adapter_id for group in state.residents] == ready
    assert state.open_groups == [group for group in (state.base, *state.residents) if state.is_open(group)]


def _check_rows(state: SchedulerState, running: list[Sequence]) -> None:
    seated = [sequence for sequence in running if sequence.row is not None]
    assert len(seated) == state.rows.total - state.rows.free, "a row is lost or shared"
    assert len({sequence.row for sequence in seated}) == len(seated), "two sequences share a row"
    rowless = [sequence for group in state.groups.values() for sequence in group.rowless]
    assert all(sequence.row is None for sequence in rowless)
    sizes = [group.running for group in state.groups.values() if group.running and group is not state.base]
    check_sizes(state.group_sizes, sizes)
    assert len(rowless) + len(seated) == len(running)
    check_parked(state.rows, {group.adapter_id: group.rows for group in state.absent.parked if group.rows})


def _check_accounts(state: SchedulerState, running: list[Sequence]) -> None:
    blocks: Counter[str] = Counter()
    for sequence in running:
        blocks[sequence.account.name] += len(sequence.held_blocks)
    rows = Counter(sequence.account.name for sequence in running if sequence.row is not None)
    seats = Counter(sequence.account.name for sequence in running)
    check_accounts(state.accounts, rows, seats, blocks, Counter(one.account.name for one in state.sequences.values()))


def check_accounts(
    accounts: Accounts,
    rows: dict[str, int],
    seats: dict[str, int],
    blocks: dict[str, int],
    asked: dict[str, int],
) -> None:
    """The accounts agree with the sequences and with what is `asked`, counted here by tenant."""
    counts = {account.name: account.open for account in accounts._accounts.values() if account.open}
    assert counts == asked, "an account has lost count of its requests"
    for account in accounts._accounts.values():
        assert account.rows == rows.get(account.name, 0), "an account has lost count of its rows"
        assert account.seats == seats.get(account.name, 0), "an account has lost count of its seats"
        assert account.blocks == blocks.get(account.name, 0), "an account has lost count of its blocks"
    assert set(accounts.active) == set(counts), "an active tenant has open requests"


def check_blocks(ledger: BlockLedger, held: Iterable[list[BlockId]]) -> None:
    """Exactly the blocks in `held` are held, and every other block is free."""
    counts = [0] * ledger.total
    for blocks in held:
        assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
        for block in blocks:
            counts[block] += 1
    assert counts == ledger._holders, "the ledger's holders differ from the sequences' blocks"
    free = {block for block, holders in enumerate(counts) if not holders}
    assert free == {*ledger._blank, *ledger._kept}
    assert {block for block in free if ledger._is_named[block]} == set(ledger._kept)
    assert {block: key for key, block in ledger._block_of.items()} == ledger._key_of
    assert all(block in ledger._key_of for block, is_named in enumerate(ledger._is_named) if is_named)


def check_slots(ledger: SlotLedger) -> None:
    residencies = ledger.residencies
    taken = [residency.slot for residency in residencies.values()]
    assert sorted([*taken, *ledger._empty]) == list(range(ledger.most)), "a slot is lost or shared"
    assert ledger.on_their_way == [one for one, residency in residencies.items() if not residency.is_ready]
    assert ledger.total == min(one.open for one in (ledger.matrices, ledger.pages) if one)
    for shared in filter(None, (ledger.pages, ledger.matrices)):
        assert shared._are_there == residencies.keys() | ledger._wanting, "an adapter is not counted among the others"
    if ledger.pages:
        check_pages(ledger.pages, {one: residency.pages for one, residency in residencies.items()})
    check_pages(ledger.matrices, {one: residency.matrices for one, residency in residencies.items()})


def check_pages(ledger: PageLedger, held: dict[AdapterId, tuple[int, ...]]) -> None:
    taken = [page for pages in held.values() for page in pages]
    assert sorted([*taken, *ledger._free]) == list(range(ledger.total)), "a page is lost or shared"
    assert all(len(pages) == ledger._needs.get(one, 0) for one, pages in held.items()), "an adapter lacks a page"
    there = (ledger._needs.get(one) for one in ledger._are_there)
    for counted, needs in ((ledger._known, ledger._needs.values()), (ledger._there, there)):
        assert counted._counts == Counter(filter(None, needs)), "an adapter's pages are not counted right"
        assert counted.open == counted._find_open()


def check_parked(ledger: RowLedger, parked: dict[AdapterId, int]) -> None:
    assert ledger._parked == parked, "a parked row is lost"
    assert ledger._parked_rows == sum(parked.values())


def check_sizes(counted: GroupSizes, sizes: list[int]) -> None:
    assert counted._sizes == sorted(sizes), "an adapter's requests are not counted right"
    assert counted.most == sum(counted._sizes[-counted._slots :] if counted._slots else ())
