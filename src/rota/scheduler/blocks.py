"""The block ledger knows which sequences hold which KV block, and what a free block still contains.

A full block is named by a chain: its own tokens hashed onto the name of the block before it, starting from the
adapter and the cache scope. So equal names mean equal text, equal weights *and* the same scope: adapters never share
KV, and neither do tenants, unless the key file says so. A released block keeps its name until the block is needed; the
block that was unused for longest goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from rota.core.ids import AdapterId, BlockId

BlockKey = bytes


def first_key(adapter: AdapterId, scope: str = "") -> BlockKey:
    """The start of the chain of names of an adapter's blocks, within a cache scope."""
    name = adapter.to_bytes(16, "little")
    return blake2b(scope.encode(), digest_size=16, key=name).digest() if scope else name


def next_key(previous: BlockKey, tokens: Sequence[int]) -> BlockKey:
    # A cryptographic hash, not Python's: a collision would show one client the context of another.
    return blake2b(array("q", tokens).tobytes(), digest_size=16, key=previous).digest()


class BlockLedger:
    """Counts the holders of every block; it has integers only, and no memory of the device."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        self.block_size = block_size
        self._holders = [0] * blocks
        # A block that is written anew is nameless at once, in `_is_named`. The two dicts forget its name when the block
        # gets another one: thousands of blocks that change hands in one pass would take long otherwise.
        self._is_named = bytearray(blocks)
        self._key_of: dict[BlockId, BlockKey] = {}
        self._block_of: dict[BlockKey, BlockId] = {}
        # Free blocks. Blank ones are reused first, the last of the list first; then named ones, by time of release.
        self._blank: list[BlockId] = [BlockId(block) for block in reversed(range(blocks))]
        self._kept: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def named(self) -> int:
        """Blocks that can be found by what they contain."""
        return self._is_named.count(1)

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._kept)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def has(self, key: BlockKey) -> bool:
        """Is there a block of this name?"""
        block = self._block_of.get(key)
        return block is not None and bool(self._is_named[block])

    def is_held(self, key: BlockKey) -> bool:
        """Does a sequence hold the block of this name?"""
        block = self._block_of.get(key)
        return block is not None and bool(self._is_named[block]) and self._holders[block] > 0

    def find(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The blocks that contain the longest run of `keys` from the first on; they are not held yet."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None or not self._is_named[block]:
                break
            found.append(block)
        return found

    def cost_of(self, found: list[BlockId], blocks: int) -> int:
        """How many free blocks it takes to hold `found` and further blocks, `blocks` in all."""
        return blocks - sum(1 for block in found if self._holders[block])

    def hold(self, found: list[BlockId]) -> None:
        """Hold blocks that `find` gave."""
        holders = self._holders
        for block in found:
            if holders[block] == 0:
                del self._kept[block]
            holders[block] += 1

    def allocate(self, count: int) -> list[BlockId]:
        """Hold `count` blocks to write into; their old content is forgotten. The caller has checked `free`."""
        # All at once: a prompt of 32,000 tokens takes two thousand blocks in one pass.
        first = max(0, len(self._blank) - count)
        taken = self._blank[first:]
        del self._blank[first:]
        taken.reverse()
        popitem, is_named, holders = self._kept.popitem, self._is_named, self._holders
        taken += [popitem(last=False)[0] for _ in range(count - len(taken))]
        for block in taken:
            is_named[block] = 0
            holders[block] = 1
        return taken

    def allocate_one(self) -> BlockId:
        block = self._blank.pop() if self._blank else self._kept.popitem(last=False)[0]
        self._is_named[block] = 0
        self._holders[block] = 1
        return block

    def publish(self, block: BlockId, key: BlockKey) -> None:
        """Let a full, written block be found by its name. The first block with a name keeps the name."""
        if self._is_named[block] or self.has(key):
            return
        if (old_key := self._key_of.pop(block, None)) is not None:
            del self._block_of[old_key]
        if (old_block := self._block_of.get(key)) is not None:
            del self._key_of[old_block]  # it had this name until it was written anew
        self._block_of[key] = block
        self._key_of[block] = key
        self._is_named[block] = 1

    def release(self, blocks: list[BlockId]) -> None:
        """Release a sequence's blocks, the last one first: the beginning of a text is worth keeping longest."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._is_named[block]:
                self._kept[block] = None
            else:
                self._blank.append(block)

    def forget(self) -> None:
        """Drop every name: no block is found any more. Sequences keep the blocks that they hold."""
        self._is_named = bytearray(self.total)
        self._key_of.clear()
        self._block_of.clear()
        self._blank[:0] = reversed(self._kept)  # they are reused in the same order as before
        self._kept.clear()
