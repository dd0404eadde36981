"""The prefix lookup finds the written blocks that a waiting sequence begins with, with bounded work in a pass.

A block's name is hashed once, and a pass hashes few names: a long prompt is hashed over several passes, and mostly
while it waits for something else. How far a lookup came is kept with the sequence, so a sequence that is refused again
and again costs nothing again. Between two passes the end of a text is forgotten first. So a look begins at the end of
what was found, and only a sequence that starts has all of its blocks looked up again.
"""

from __future__ import annotations

from collections import deque

from rota.core.ids import BlockId
from rota.scheduler.blocks import BlockLedger, first_key, next_key
from rota.scheduler.sequence import Phase, Sequence

# What a pass may spend on lookups, in blocks that are looked up by name, each 0.1 µs on a Xeon. To hash a name takes as
# long as about 16 of these. So a pass hashes 128 names, of 2,048 tokens, or more if that takes less than a fiftieth of
# a step: long prompts make long steps, and what is found is not computed.
MOST_LOOKS = 2048
LOOKS_PER_STEP_S = 200_000
LOOKS_PER_KEY = 16


class PrefixLookup:
    """`is_unfinished` says that a sequence could not be looked up to its end in this pass."""

    def __init__(self, blocks: BlockLedger) -> None:
        self._blocks = blocks
        self._left = MOST_LOOKS
        self._to_hash: deque[Sequence] = deque()  # in the order in which they came
        self.is_unfinished = False

    def expect(self, sequence: Sequence) -> None:
        """A sequence begins to wait."""
        self._to_hash.append(sequence)

    def begin_pass(self, step_s: float) -> None:
        """Steps took this long recently."""
        self._left = max(MOST_LOOKS, int(step_s * LOOKS_PER_STEP_S))
        self.is_unfinished = False

    def end_pass(self) -> None:
        """Hash ahead with what is left: the names are needed in any case, to publish the blocks."""
        size = self._blocks.block_size
        while self._to_hash and self._left > 0:
            sequence = self._to_hash[0]
            done, most = len(sequence.block_keys), findable(sequence, size)
            if sequence.phase is not Phase.WAITING or done >= most:
                self._to_hash.popleft()
                continue
            more = min(most - done, -(-self._left // LOOKS_PER_KEY))
            extend_keys(sequence, done + more, size)
            self._left -= more * LOOKS_PER_KEY

    def is_complete(self, sequence: Sequence) -> bool:
        """Look further for a sequence's blocks; False if a later pass has to go on."""
        has, keys, size = self._blocks.has, sequence.block_keys, self._blocks.block_size
        found, most = sequence.found, findable(sequence, size)
        # Half of what is left: behind a long prompt, short ones can still be looked up.
        spent, may_spend = 0, self._left // 2
        while found and spent <= may_spend and not has(keys[found - 1]):
            found -= 1
            spent += 1
        is_complete = spent <= may_spend
        while is_complete and found < most:
            if found == len(keys):
                extend_keys(sequence, found + 1, size)
                spent += LOOKS_PER_KEY
            if not has(keys[found]):
                break
            found += 1
            spent += 1
            is_complete = spent <= may_spend or found == most
        self._left = max(0, self._left - spent)
        sequence.found = found
        self.is_unfinished |= not is_complete
        return is_complete

    def charge(self, blocks: int) -> None:
        """A sequence takes blocks in this pass, which takes about as long as to look them up."""
        self._left = max(0, self._left - blocks)

    def held(self, sequence: Sequence) -> int:
        """About how many of the blocks found for a sequence are held by others: a text is held from its beginning."""
        is_held, keys = self._blocks.is_held, sequence.block_keys
        low, high = 0, sequence.found
        while low < high:
            middle = (low + high + 1) // 2
            if is_held(keys[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def blocks_of(self, sequence: Sequence) -> list[BlockId]:
        """The blocks that were found, each looked up again."""
        found = self._blocks.find(sequence.block_keys[: sequence.found])
        sequence.found = len(found)
        return found


def findable(sequence: Sequence, block_size: int) -> int:
    """How many full blocks lie before the last token: the last token is always computed, to sample from it."""
    if sequence.pooling == "mean":
        return 0  # of a token that is found in the cache there is no hidden state
    full = (len(sequence.tokens) - 1) // block_size
    if sequence.scored < sequence.prompt_length:
        # A token that is found in the cache is not computed, and so gives no score for the token after it.
        full = min(full, (sequence.scored - 1) // block_size)
    return full


def extend_keys(sequence: Sequence, full: int, block_size: int) -> None:
    """Name the first `full` blocks of a sequence's tokens, once."""
    keys = sequence.block_keys
    while len(keys) < full:
        previous = keys[-1] if keys else first_key(sequence.request.adapter_id, sequence.request.cache_scope)
        start = len(keys) * block_size
        keys.append(next_key(previous, sequence.tokens[start : start + block_size]))
