"""A process of the room keeps out of everything that its jobs do not need: memory, files, other users' time."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path

# The engine and the event loop go first where cores are few.
_NICENESS = 5
# What an environment's names say of secrets. A process that reads what strangers send shall not know them.
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")

# From <linux/landlock.h> and <linux/prctl.h>; the numbers of the calls are the same on all processors.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_CREATE_RULESET_VERSION, _PR_SET_NO_NEW_PRIVS = 1, 38
# All rights to files that the first version knows but reading: to read lies in the model's folder, and in Python.
_READS = 1 << 0 | 1 << 2 | 1 << 3  # EXECUTE, READ_FILE, READ_DIR
_ALL_RIGHTS = (1 << 13) - 1
_TRUNCATE, _TRUNCATE_VERSION = 1 << 14, 3
_NETWORK_RIGHTS, _NETWORK_VERSION = 3, 4  # bind and connect, of TCP


def without_secrets(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not any(word in name.upper() for word in _SECRET)}


def give_way() -> None:
    """Ctrl-C and SIGHUP reach the whole group, but only the server decides what they mean."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)


def limit_memory(more_bytes: int) -> None:
    """Let an allocation beyond the limit fail in this process, before the system kills another one."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):  # a lower limit is in force already
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))


def lock_in() -> bool:
    """Take the rights to write files and to connect from this process, for good. False where Linux has no Landlock."""
    if sys.platform != "linux":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    if version < 1:
        return False
    files = (_ALL_RIGHTS & ~_READS) | (_TRUNCATE if version >= _TRUNCATE_VERSION else 0)
    rights = struct.pack("QQ", files, _NETWORK_RIGHTS if version >= _NETWORK_VERSION else 0)
    rules = call(_CREATE_RULESET, rights, ctypes.c_size_t(16 if version >= _NETWORK_VERSION else 8), 0)
    if rules < 0:
        return False
    try:
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(call(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)
