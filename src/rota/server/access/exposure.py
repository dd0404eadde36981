"""Exposure is who can reach the server; a server that others can reach needs keys, or an explicit flag."""

from __future__ import annotations

import ipaddress
import re
import socket

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.server.access.keys import KeyRing

# In the place of an origin: those of all sites, but not of pages that have none.
EVERY_SITE = "*"
_OWN_PORTS = {"http": ":80", "https": ":443"}


def check_exposure(config: ServerConfig, keys: KeyRing) -> None:
    """Raises ConfigError for a server that others can reach without keys, unless --allow-anyone is given.

    Without keys every web page is such another, wherever the server listens. With keys a page is no more than a client
    that has none: browsers add no key by themselves.
    """
    if not keys and EVERY_SITE in config.allowed_origins:
        raise ConfigError(
            "--allowed-origins * lets the pages of every site in, and there are no keys: give --api-key or "
            "--api-key-file, or name the sites."
        )
    if not keys and not config.allow_anyone and not is_loopback(config.host):
        raise ConfigError(
            f"Others can reach {config.host or 'every address'}, and there are no keys: give --api-key or "
            "--api-key-file, listen on 127.0.0.1, or say --allow-anyone if every client may do everything."
        )


def load_refusal(config: ServerConfig, keys: KeyRing, adapter_root: str | None) -> str:
    """Why adapters are not loaded over HTTP, or an empty text. Only local users may name any folder of the machine."""
    if adapter_root is not None or (not keys and is_loopback(config.host)):
        return ""
    return "Adapters are loaded over HTTP only from a folder named with --adapter-root; this server has none."


def describe(config: ServerConfig, keys: KeyRing) -> str:
    """A sentence for the operator: who may use the server."""
    if keys:
        return "Requests need a key."
    if is_loopback(config.host):
        return "There are no keys: every user of this machine may do everything, and other machines cannot reach it."
    return f"There are no keys: every client that can reach {config.host} may do everything."


def is_local_name(host: str, own_name: str) -> bool:
    """Whether a Host header names this machine in a way that an attacker cannot choose. An address is safe too."""
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower() in ("localhost", own_name.lower()) or name.lower().endswith(".localhost")
    return True


def is_own_origin(origin: str, host: str) -> bool:
    """Whether a page has the host and the port of the server that its browser asks.

    Schemes are not compared: where a proxy ends TLS, the page has https and the request has http.
    """
    scheme, _, place = origin.lower().partition("://")
    return bool(place) and place == host.lower().removesuffix(_OWN_PORTS.get(scheme, ""))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. For a name, all its addresses must be local."""
    if not host:
        return False  # to sockets an empty host is every address
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
    except (OSError, UnicodeError, ValueError):
        return False
