"""Exposure is who can reach the server, and what that must not mean: nobody is let in by oversight."""

from __future__ import annotations

import ipaddress
import re
import socket

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.server.access.keys import KeyRing


def refuse_open_doors(config: ServerConfig, keys: KeyRing) -> None:
    """Raises ConfigError for a server that others reach, without keys, unless that is what was asked for."""
    if not keys and not config.allow_anyone and not is_loopback(config.host):
        raise ConfigError(
            f"Others can reach {config.host or 'every address'}, and there are no keys: give --api-key or "
            "--api-key-file, or listen on 127.0.0.1, or say --allow-anyone if whoever reaches it may do everything."
        )


def load_refusal(config: ServerConfig, keys: KeyRing, adapter_root: str | None) -> str:
    """Why adapters are not loaded over HTTP, or nothing: only this machine's own users may name any of its folders."""
    if adapter_root is not None or (not keys and is_loopback(config.host)):
        return ""
    return "Adapters are loaded over HTTP only from a folder named with --adapter-root; this server has none."


def describe(config: ServerConfig, keys: KeyRing) -> str:
    """Who may ask, in a sentence for whoever starts the server."""
    if keys:
        return "Requests need a key."
    if is_loopback(config.host):
        return "There are no keys: everyone on this machine may ask it for everything, and nobody else can reach it."
    return f"There are no keys: everyone who can reach {config.host} may ask it for everything."


def is_local_name(host: str, own_name: str) -> bool:
    """Whether a Host header means this machine by a name that nobody else can give it; an address is no name."""
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower() in ("localhost", own_name.lower()) or name.lower().endswith(".localhost")
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name counts by all the addresses it stands for."""
    if not host:
        return False  # sockets take it for every address
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
    except (OSError, UnicodeError, ValueError):
        return False
