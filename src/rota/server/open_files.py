"""The limit of open files bounds connections, because every socket is an open file."""

from __future__ import annotations

import sys

# Where there is no limit, or none that is known.
PLENTY = 2**20
# For what is open besides connections: the sockets to the engine, logs, folders of models, threads' own files.
RESERVE = 64


def raise_open_files() -> int:
    """Raise the limit of this process as far as it may, and return the limit."""
    if sys.platform == "win32":
        return PLENTY
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError):
        pass  # macOS names a hard limit that it does not allow
    return PLENTY if soft == resource.RLIM_INFINITY else soft
