"""A port is held from the start, before anything is read, so that one that is taken is refused at once."""

from __future__ import annotations

import socket

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError

METRICS_FLAGS = "--metrics-host and --metrics-port"


def hold_port(host: str, port: int, flags: str = "--host and --port") -> socket.socket:
    """A socket that holds a port but accepts no connection yet. Raises ConfigError if the port is taken.

    It does not listen yet. So a client that connects while the model is read is refused at once and does not hang.
    """
    is_six = ":" in host
    holder = socket.socket(socket.AF_INET6 if is_six else socket.AF_INET)
    try:
        # Otherwise connections of a server that has just ended block the port for a minute.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_six:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((host, port))
    except (OSError, OverflowError) as error:
        holder.close()
        raise taken(host, port, error, flags) from error
    return holder


def hold_metrics_port(config: ServerConfig) -> socket.socket | None:
    """A socket for the second port, held, or None without --metrics-port. Raises ConfigError if the port is taken."""
    if config.metrics_port is None:
        return None
    return hold_port(config.metrics_host, config.metrics_port, METRICS_FLAGS)


def taken(host: str, port: int, error: Exception, flags: str = "--host and --port") -> ConfigError:
    """What is said of a port that cannot be had."""
    return ConfigError(
        f"Cannot listen on {host}, port {port} ({error}); choose another with {flags} (0: any free port)."
    )
