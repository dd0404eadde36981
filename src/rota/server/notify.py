"""A service manager such as systemd is told when the server serves, and when it stops."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send one line of sd_notify(3), such as `READY=1`; without NOTIFY_SOCKET nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        # A name that begins with @ is abstract: no file, and a zero byte in the place of the @.
        sender.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
