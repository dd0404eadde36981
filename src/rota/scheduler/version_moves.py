"""Version moves let the requests of one version of an adapter go on under another, from their next token on.

A step in flight still gives the old version's token. So a sequence is moved at once, but it sits down under the new
version only when no step contains it any more, as after a preemption: that is the border between two tokens.
"""

from __future__ import annotations

from dataclasses import replace

from rota.core.events import Moved, Preempted
from rota.core.messages import MoveRequests
from rota.scheduler.adapter_state import Group, Standing
from rota.scheduler.sequence import Sequence
from rota.scheduler.state import SchedulerState


def move_requests(state: SchedulerState, message: MoveRequests) -> None:
    """Every user of the old version becomes a user of the new one, with its tokens and its place among others.

    Does nothing if either version is not there: the requests end under the version that they have.
    """
    old, new = state.groups.get(message.old), state.groups.get(message.new)
    if old is None or new is None or new.standing is not Standing.KNOWN:
        return
    for sequence in [*old.queue]:
        state.dequeue(sequence)
        _rename(sequence, old, new)
        state.enqueue(sequence)
    for sequence in [*old.running_sequences()]:
        # Of a prompt that is only read, half would be the old version's.
        if message.keeps_kv and sequence.pooling is None:
            _hand_over(state, sequence, old, new)
        else:
            _begin_again(state, sequence, old, new, message.at)
    state.note_users(old)
    state.note_users(new)


def _begin_again(state: SchedulerState, sequence: Sequence, old: Group, new: Group, at: float) -> None:
    """Back to the queue; the tokens stay, the KV is computed again by the new version."""
    state.note_readers([sequence], at)
    state.stand_up(sequence)
    sequence.refusal = None
    _rename(sequence, old, new)
    state.enqueue(sequence)
    state.outbox.append(Preempted(sequence.request_id, at))


def _hand_over(state: SchedulerState, sequence: Sequence, old: Group, new: Group) -> None:
    """Without a row: the device learns of a row's adapter when a sequence sits down there."""
    blocks = len(sequence.held_blocks)
    if sequence.row is not None:
        state.lose_row(sequence)
    state.count_blocks(sequence, -blocks)
    state.group_sizes.shrink(old.running)
    old.part(sequence)
    _rename(sequence, old, new)
    state.group_sizes.grow(new.running)
    new.take_rowless(sequence)
    state.count_blocks(sequence, blocks)
    sequence.is_mixed = True


def _rename(sequence: Sequence, old: Group, new: Group) -> None:
    old.exit(sequence.account)
    new.enter(sequence.account)
    if sequence.moved_from is None:
        sequence.moved_from = old.adapter
    sequence.request = replace(sequence.request, adapter_id=new.adapter_id)
    # Names of blocks begin with the version, so that no KV is found under another.
    sequence.block_keys = []
    sequence.found = 0


def tell_move(state: SchedulerState, sequence: Sequence, at: float) -> None:
    """A sequence sits down: if it left another version, that is told once."""
    old, new = sequence.moved_from, state.group_of(sequence).adapter
    if old is None or new is None:
        return
    moved = Moved(
        request_id=sequence.request_id,
        at=at,
        old=old.adapter_id,
        new=new.adapter_id,
        old_version=old.version,
        new_version=new.version,
        output_tokens=sequence.output_length,
        kept_kv=sequence.is_mixed,
    )
    sequence.moved_from = None
    state.outbox.append(moved)
