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
        self._key_of: dict[BlockId, BlockKey] = {}
        self._block_of: dict[BlockKey, BlockId] = {}
        # Free blocks, first to be reused first: blank ones, then by time of release.
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(block), None) for block in range(blocks))

    @property
    def named(self) -> int:
        """Blocks that can be found by what they contain."""
        return len(self._key_of)

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def find(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The blocks that contain the longest run of `keys` from the first on; they are not held yet."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def cost_of(self, found: list[BlockId], blocks: int) -> int:
        """How many free blocks it takes to hold `found` and further blocks, `blocks` in all."""
        return blocks - sum(1 for block in found if self._holders[block])

    def hold(self, found: list[BlockId]) -> None:
        """Hold blocks that `find` gave."""
        for block in found:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[BlockId]:
        """Hold `count` blocks to write into; their old content is forgotten. The caller has checked `free`."""
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> BlockId:
        block, _ = self._free.popitem(last=False)
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        self._holders[block] = 1
        return block

    def publish(self, block: BlockId, key: BlockKey) -> None:
        """Let a full, written block be found by its name. The first block with a name keeps the name."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: list[BlockId]) -> None:
        """Release a sequence's blocks, the last one first: the beginning of a text is worth keeping longest."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Drop every name: no block is found any more. Sequences keep the blocks that they hold."""
        self._key_of.clear()
        self._block_of.clear()

    def check(self, held: Iterable[list[BlockId]]) -> None:
        """Assert that exactly the blocks in `held` are held, and that every other block is free."""
        counts = [0] * self.total
        for blocks in held:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "the ledger's holders differ from the sequences' blocks"
        assert {block for block, holders in enumerate(counts) if not holders} == set(self._free)
        assert {block: key for key, block in self._block_of.items()} == self._key_of
