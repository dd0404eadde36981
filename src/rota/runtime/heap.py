"""A process freezes its heap when it is about to serve: what exists then lives as long as the process."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Let the garbage collector leave alone whatever exists now.

    Libraries and weights make hundreds of thousands of objects; walking them in the middle of a step, or of somebody's
    stream, would hold up everybody for tens of milliseconds and free nothing.
    """
    gc.collect()
    gc.freeze()
