"""A process freezes its heap before it serves: objects that exist then live as long as the process."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Let the garbage collector skip all objects that exist now.

    Libraries and weights make hundreds of thousands of objects. A collection during a step or a stream would visit all
    of them, delay every request for tens of milliseconds, and free nothing.
    """
    gc.collect()
    gc.freeze()
