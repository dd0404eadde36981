"""The limit of open files bounds connections, because every socket is an open file."""

from __future__ import annotations

import sys

# Where there is no limit, or none that is known.
PLENTY = 2**20
# For what is open besides connections: the sockets to the engine, logs, folders of models, threads' own files.
RESERVE = 64
# A limit is raised no further than is of use: some programs walk through all files that they could have open.
ENOUGH = 2**16


def raise_open_files(enough: int = ENOUGH) -> int:
    """Raise the limit of this process until it is enough, or as far as it may be raised, and return the limit."""
    if sys.platform == "win32":
        return PLENTY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft == resource.RLIM_INFINITY or soft >= goal:
        return PLENTY if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    except (OSError, ValueError):  # macOS names a hard limit that it does not allow
        return soft
    return goal
