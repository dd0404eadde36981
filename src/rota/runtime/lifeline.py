"""A process ends with its parent process, however the parent ends.

As a program, `python lifeline.py PARENT COMMAND …` becomes COMMAND, and Linux kills COMMAND when process PARENT ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def die_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends, also during a long call; stays in force after `exec`.

    For Linux the parent is the *thread* that started this process: that thread must live as long as the process may.
    Other systems have no such call; there this does nothing.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def tied(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The same command, in a process that ends with this process; start it from a thread that lives as long."""
    # Without the site's packages Python starts in 20 ms; this file needs none of them.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *(os.fspath(word) for word in command)]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
