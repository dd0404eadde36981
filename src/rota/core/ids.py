"""Names for the things that rooms hand to each other."""

from typing import NewType

RequestId = NewType("RequestId", str)
AdapterId = NewType("AdapterId", int)
BlockId = NewType("BlockId", int)
Row = NewType("Row", int)
Slot = NewType("Slot", int)

# The base model is an adapter id like any other, so "no adapter" and "nothing" never look alike.
BASE = AdapterId(0)
