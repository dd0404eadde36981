"""A guard lets one peer in at a port, by its key, and notices when a line to that peer breaks."""

from __future__ import annotations

import math
import socket as sockets
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from rota.runtime.remote.strangers import StrangerLog, Visitors

# ZAP: libzmq asks here, at every handshake of a socket of the same context, whether a key may come in.
_ZAP = "inproc://zeromq.zap.01"
_LINE_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Guard:
    """A thread that answers for a socket that will be bound, and looks at one that will be connected.

    A context has one guard at a time, and a guard has one guest. Until a guest is expected, no peer gets in.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bound: zmq.Socket[bytes],
        connected: zmq.Socket[bytes],
        on_lost: Callable[[], None],
    ) -> None:
        self.log = StrangerLog()
        self._bound, self._connected, self._on_lost = bound, connected, on_lost
        self._expected: bytes | None = None
        self._visitors, self._guest_is_in, self._line_stands = Visitors(), threading.Event(), threading.Event()
        self._asked = context.socket(zmq.REP)
        self._asked.bind(_ZAP)
        self._arrivals = bound.get_monitor_socket(Visitors.EVENTS)
        self._line = connected.get_monitor_socket(_LINE_EVENTS)
        self._bell, self._ringer = sockets.socketpair()
        self._thread = threading.Thread(target=self._keep, name="rota-guard", daemon=True)
        self._thread.start()

    def expect(self, key: str) -> None:
        """Let in the peer that proves to have this public key, and no other; from any thread."""
        self._expected = z85.decode(key.encode())

    def wait_for_guest(self, timeout_s: float) -> bool:
        return self._guest_is_in.wait(timeout_s)

    def wait_for_line(self, timeout_s: float) -> bool:
        return self._line_stands.wait(timeout_s)

    def close(self) -> None:
        """For the thread that owns the two sockets."""
        self._ringer.close()
        self._thread.join()
        self._asked.unbind(_ZAP)  # at once; a socket that is closed gives its address back later
        for socket in (self._bound, self._connected):
            socket.disable_monitor()
        for socket in (self._asked, self._arrivals, self._line):
            socket.close()
        self._bell.close()
        self.log.say_rest()

    def _keep(self) -> None:
        answers = {self._asked: self._answer, self._arrivals: self._look_at_visitor, self._line: self._look_at_line}
        poller = zmq.Poller()
        for source in (*answers, self._bell):
            poller.register(source, zmq.POLLIN)
        while True:
            left_s = self.log.left_s
            polled = dict(poller.poll(None if left_s == math.inf else math.ceil(left_s * 1000.0)))
            if self._bell.fileno() in polled:
                return
            for source, answer in answers.items():
                if source in polled:
                    answer()
            if self.log.left_s == 0.0:
                self.log.say_rest()

    def _answer(self) -> None:
        """One question of ZAP: version, its number, domain, address, identity, mechanism, key."""
        version, number, *_, mechanism, key = self._asked.recv_multipart()
        is_guest = mechanism == b"CURVE" and key == self._expected
        status = (b"200", b"OK") if is_guest else (b"400", b"")
        self._asked.send_multipart([version, number, *status, b"", b""])

    def _look_at_visitor(self) -> None:
        event = parse_monitor_message(self._arrivals.recv_multipart())
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._guest_is_in.set()
        if why := self._visitors.note(event["event"], event["value"]):
            self.log.turned_away(why)

    def _look_at_line(self) -> None:
        event = parse_monitor_message(self._line.recv_multipart())
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._line_stands.set()
        elif self._line_stands.is_set():
            self._on_lost()
