"""A guarded line joins front and engine over TCP: each side has a port and a key, and lets in the other alone."""

from __future__ import annotations

import logging
import math
import socket as sockets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from rota.core.errors import EngineDiedError
from rota.runtime.wire import open_socket

# ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Keys prove who is at the other end of a line: each side makes a pair, and only the public half travels.

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
    _steady(socket, keys)
    socket.curve_server = True
    socket.zap_domain = b"rota"
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else every peer would get in while there is no guard
    socket.ipv6 = ":" in host
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return socket.get_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[bytes], keys: KeyPair, address: str, their_key: str) -> None:
    """Connect to a peer that can prove to be who has this public key."""
    _steady(socket, keys)
    socket.curve_serverkey = their_key.encode()
    socket.ipv6 = "[" in address
    socket.connect(address)


def _steady(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret
    socket.maxmsgsize = _LARGEST_MESSAGE
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, _KEEPALIVE_TIMES
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = _KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S
    socket.setsockopt(zmq.TCP_MAXRT, _UNCONFIRMED_MS)


# ── strangers ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Strangers are peers that a port does not let in: found in a socket's events, and told in few lines.

LOG = logging.getLogger("rota.engine")

# Between two lines; a port scan must not fill a disk.
QUIET_S = 60.0

_WHY = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "It has no key.",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "It does not know the key of this port.",
}
_LEFT = "It left before it had shown a key."
_NOISE = "It does not speak the language of this port."


class Visitors:
    """Reads the events of a bound socket: who came, whether the guest is in, and who was turned away."""

    EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )

    def __init__(self) -> None:
        self._connected: set[int] = set()
        # A success does not say of which connection: it is one of those that were there.
        self._may_be_guest: set[int] = set()
        self._was_told = False

    def note(self, event: int, value: int) -> str:
        """Why a stranger was turned away; empty if none was. One that fails is told of when it fails or leaves."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._connected.add(value)
                self._may_be_guest.discard(value)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._may_be_guest |= self._connected
            case zmq.EVENT_DISCONNECTED:
                return self._leave(value)
            case _:
                self._was_told = True
                return _why(event, value)
        return ""

    def _leave(self, connection: int) -> str:
        is_known = self._was_told or connection in self._may_be_guest
        self._was_told = False
        self._connected.discard(connection)
        self._may_be_guest.discard(connection)
        return "" if is_known else _NOISE


def _why(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "Its key is not the one that is expected."
    return _WHY.get(value, _LEFT)


class StrangerLog:
    """One line for the first stranger, and at most one a minute for all that follow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = ""
        self._clock = clock
        self._said_at = -math.inf
        self._more = 0

    @property
    def left_s(self) -> float:
        """How long until there is something to say, if no stranger comes."""
        return max(0.0, self._said_at + QUIET_S - self._clock()) if self._more else math.inf

    def turned_away(self, why: str) -> None:
        if self._clock() - self._said_at < QUIET_S:
            self._more += 1
            return
        self.say_rest()
        LOG.warning("A stranger at %s was turned away. %s", self.port, why)
        self._said_at = self._clock()

    def say_rest(self) -> None:
        """Tell how many came since the last line, if there were any."""
        if self._more:
            LOG.warning("Strangers at %s were turned away %d more times.", self.port, self._more)
            self._said_at, self._more = self._clock(), 0


# ── line ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A line lets one peer in at its port, by its key, and notices when the connection to that peer breaks.

# ZAP: libzmq asks here, at every handshake of a socket of the same context, whether a key may come in.
_ZAP = "inproc://zeromq.zap.01"
_OUTLET_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class GuardedLine:
    """One side. Both are alike: an inbox at a port of its own, and an outlet that connects to the other's port.

    A thread answers for the inbox and looks at the outlet. A context has one line at a time, and a line has one guest.
    Until a guest is expected, no peer gets in.

    A line that breaks is not used again, though ZeroMQ would connect anew: what was on its way may be lost, and
    neither side would know. `on_lost` is called by the thread of the line.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], on_lost: Callable[[], None], linger_s: float = 0.0
    ) -> None:
        self._keys, self._on_lost = KeyPair.new(), on_lost
        self.public_key = self._keys.public
        self.inbox = open_socket(context, zmq.PULL)
        self.outlet = open_socket(context, zmq.PUSH, linger_s)
        self._log, self._visitors = StrangerLog(), Visitors()
        self._expected: bytes | None = None
        self.guest_is_in = threading.Event()  # the other side has connected to this side's port
        self.is_connected = threading.Event()  # the other side has let this one in
        self._asked = context.socket(zmq.REP)
        self._asked.bind(_ZAP)
        self._arrivals = self.inbox.get_monitor_socket(Visitors.EVENTS)
        self._outlet_events = self.outlet.get_monitor_socket(_OUTLET_EVENTS)
        self._bell, self._ringer = sockets.socketpair()
        self._thread = threading.Thread(target=self._keep, name="rota-guard", daemon=True)
        self._thread.start()

    def listen(self, host: str) -> str:
        """Take a free port, and return its address; no peer is let in yet."""
        try:
            self._log.port = listen(self.inbox, self._keys, host)
        except zmq.ZMQError as error:
            raise EngineDiedError(f"No port could be taken at {host}: {error}.") from error
        return self._log.port

    def expect(self, their_key: str) -> None:
        """Let in the peer that proves to have this public key, and no other; from any thread."""
        self._expected = z85.decode(their_key.encode())

    def connect(self, address: str, their_key: str) -> None:
        """Records that are sent from now on reach the other side; a send before would block."""
        connect(self.outlet, self._keys, address, their_key)

    def close(self) -> None:
        """For the thread that owns the two sockets."""
        self._ringer.close()
        self._thread.join()
        self._asked.unbind(_ZAP)  # at once; a socket that is closed gives its address back later
        for socket in (self.inbox, self.outlet):
            socket.disable_monitor()
        for socket in (self._asked, self._arrivals, self._outlet_events, self.outlet, self.inbox):
            socket.close()
        self._bell.close()
        self._log.say_rest()

    def _keep(self) -> None:
        answers = {
            self._asked: self._answer,
            self._arrivals: self._look_at_visitor,
            self._outlet_events: self._look_at_outlet,
        }
        poller = zmq.Poller()
        for source in (*answers, self._bell):
            poller.register(source, zmq.POLLIN)
        while True:
            left_s = self._log.left_s
            polled = dict(poller.poll(None if left_s == math.inf else math.ceil(left_s * 1000.0)))
            if self._bell.fileno() in polled:
                return
            for source, answer in answers.items():
                if source in polled:
                    answer()
            if self._log.left_s == 0.0:
                self._log.say_rest()

    def _answer(self) -> None:
        """One question of ZAP: version, its number, domain, address, identity, mechanism, key."""
        version, number, *_, mechanism, key = self._asked.recv_multipart()
        is_guest = mechanism == b"CURVE" and key == self._expected
        status = (b"200", b"OK") if is_guest else (b"400", b"")
        self._asked.send_multipart([version, number, *status, b"", b""])

    def _look_at_visitor(self) -> None:
        event = parse_monitor_message(self._arrivals.recv_multipart())
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.guest_is_in.set()
        if why := self._visitors.note(event["event"], event["value"]):
            self._log.turned_away(why)

    def _look_at_outlet(self) -> None:
        event = parse_monitor_message(self._outlet_events.recv_multipart())
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected.set()
        elif self.is_connected.is_set():
            self._on_lost()
