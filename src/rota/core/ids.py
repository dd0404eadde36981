"""Names for the things that rooms hand to each other."""

from typing import NewType

RequestId = NewType("RequestId", str)
AdapterId = NewType("AdapterId", int)
EngineId = NewType("EngineId", int)
BlockId = NewType("BlockId", int)
Row = NewType("Row", int)
Slot = NewType("Slot", int)

# The base model has an adapter id like any other, so "no adapter" and "nothing" never look alike.
BASE = AdapterId(0)

# The only engine there is today.
FIRST_ENGINE = EngineId(0)
