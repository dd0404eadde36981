"""Connection limits say how many connections may be open, in all and for one address."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from rota.core.errors import ConfigError
from rota.core.listen_config import ListenConfig
from rota.server.door.open_files import RESERVE

# More than requests can run or wait. A connection takes some 20 kB, and with TLS some 100 kB.
MOST_BY_DEFAULT = 16_384
# With fewer files than the reserve some connections are still taken: not all of the reserve is always used.
FEWEST = 16
# A limit of open files that leaves fewer connections than this is worth a sentence at the start.
FEW = 256

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    in_all: int
    per_address: int
    trusted: tuple[Network, ...] = ()

    def is_trusted(self, host: str) -> bool:
        """Whether an address is a proxy's, which has many clients behind it."""
        return bool(self.trusted) and any(_address(host) in network for network in self.trusted)


def find_limits(config: ListenConfig, open_files: int) -> ConnectionLimits:
    """The limits of a process that may open so many files. Raises ConfigError if it may not open enough."""
    most = max(open_files - RESERVE, FEWEST)
    in_all = min(most, MOST_BY_DEFAULT) if config.max_connections == "auto" else config.max_connections
    if in_all > most:
        raise ConfigError(
            f"max_connections is {in_all}, but this process may open {open_files} files, and {RESERVE} of them are for "
            f"other things; raise the limit (ulimit -n {in_all + RESERVE}), or lower max_connections."
        )
    share = config.max_connections_per_address
    return ConnectionLimits(
        in_all=in_all,
        per_address=max(in_all // 2, 1) if share == "auto" else share,
        trusted=tuple(map(ipaddress.ip_network, config.trusted_proxies)),
    )


def few_connections(config: ListenConfig, limits: ConnectionLimits, open_files: int) -> str:
    """A sentence for the operator if the limit of open files leaves only few connections, or an empty text."""
    if config.max_connections != "auto" or limits.in_all >= FEW:
        return ""
    return (
        f"Rota takes at most {limits.in_all} connections, because this process may open only {open_files} files; "
        "ulimit -n raises that limit."
    )


def group_of(host: str) -> str:
    """What counts as one address: with IPv6 a network of /64, because one client has all of its addresses."""
    address = _address(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
