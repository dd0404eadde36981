"""Keys prove who is at the other end of a line: each side makes a pair, and only the public half travels."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

# A prompt of a million tokens takes 5 MiB. Without a limit a stranger could make this process hold what he sends.
_LARGEST_MESSAGE = 64 * 1024 * 1024
# A peer that knows its keys needs two round trips.
_HANDSHAKE_MS = 10_000
# The kernel asks a peer that says nothing, so that no firewall forgets a quiet line and no dead one looks quiet.
_KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S, _KEEPALIVE_TIMES = 20, 10, 4
# What a peer's kernel does not confirm within this time ends the line: its machine or the network is gone.
_UNCONFIRMED_MS = 60_000


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A pair for CURVE, in Z85. The secret key never leaves the process that made it."""

    public: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret)


def listen(socket: zmq.Socket[bytes], keys: KeyPair, host: str) -> str:
    """Bind to a free port of a numeric address and return where; a guard decides who gets in."""
    _steady(socket)
    socket.curve_server = True
    _own(socket, keys)
    socket.zap_domain = b"rota"
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else every peer would get in while there is no guard
    socket.ipv6 = ":" in host
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return socket.get_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[bytes], keys: KeyPair, address: str, their_key: str) -> None:
    """Connect to a peer that can prove to be who has this public key."""
    _steady(socket)
    _own(socket, keys)
    socket.curve_serverkey = their_key.encode()
    socket.ipv6 = "[" in address
    socket.connect(address)


def _own(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret


def _steady(socket: zmq.Socket[bytes]) -> None:
    socket.maxmsgsize = _LARGEST_MESSAGE
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, _KEEPALIVE_TIMES
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = _KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S
    socket.setsockopt(zmq.TCP_MAXRT, _UNCONFIRMED_MS)
