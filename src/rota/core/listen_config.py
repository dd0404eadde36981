"""Listening says where clients reach the server, from which sites, and how much a connection may take."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from typing import Literal

from rota.core.errors import ConfigError
from rota.core.options import option

# An origin as browsers send it: without a path, and without the port that belongs to its scheme.
_ORIGIN = re.compile(r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Address, certificate, sites, and limits of connections."""

    host: str = option("127.0.0.1", "Address to listen on; one that others reach needs keys, or allow_anyone.")
    port: int = option(30000, "Port to listen on; 0 picks a free one.")
    ssl_certfile: str | None = option(
        None, "A certificate in PEM format, with its chain: the server then speaks HTTPS, and no HTTP."
    )
    ssl_keyfile: str | None = option(
        None, "The certificate's private key in PEM format, without a password; left out: it is in ssl_certfile."
    )
    max_connections: int | Literal["auto"] = option(
        "auto", "Connections that may be open at a time; 'auto': what the limit of open files allows, at most 16384."
    )
    max_connections_per_address: int | Literal["auto"] = option(
        "auto", "Connections of one address, or of one /64 network of IPv6; 'auto': half of max_connections."
    )
    trusted_proxies: tuple[str, ...] = option(
        (), "Addresses or networks of proxies, also on this machine: max_connections_per_address does not bind them."
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Sites whose pages may use the server through a browser (CORS), as https://chat.example; pages of the server's "
        "own host always may. '*': every site, on a server with keys.",
    )
    head_timeout: float = option(30.0, "Seconds in which a TLS handshake and the headers of a request must arrive.")
    body_timeout: float = option(
        30.0,
        "Seconds in which a body must arrive, and one more for every 10 kB that did; also how long it may rest. Else "
        "the answer is 408.",
    )

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_connections_per_address"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")
        for name in ("head_timeout", "body_timeout"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a finite number above 0, not {getattr(self, name)}.")
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        for origin in self.allowed_origins:
            _check_origin(origin)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give the certificate too.")


def _check_network(proxy: str) -> None:
    try:
        ipaddress.ip_network(proxy)
    except ValueError:
        raise ConfigError(
            f"trusted_proxies has '{proxy}'; give addresses or networks, for example 10.0.0.7 or 10.0.0.0/24."
        ) from None


def _check_origin(origin: str) -> None:
    """'null' is none: browsers send it for pages without a site, and every site can make such pages."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"allowed_origins has '{origin}'; give origins as browsers send them, for example https://chat.example or "
            "http://localhost:3000."
        )
