from __future__ import annotations

import os
import socket
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from rota.runtime.cluster.line import KeyPair, connect, listen
from tests.runtime.remote.elsewhere import HOST
from tests.waiting import TIMEOUT_S


@contextmanager
def undecided():
    """A context in which every handshake waits: its question is never answered."""
    context = zmq.Context()
    asked = context.socket(zmq.REP)
    asked.bind("inproc://zeromq.zap.01")
    try:
        yield context
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(("side", "event"), [("front", zmq.EVENT_ACCEPTED), ("engine", zmq.EVENT_CONNECTED)])
def test_a_connection_whose_peer_is_gone_ends_by_the_kernels_own_limits(side, event):
    """A machine that vanishes closes no connection, so the kernel must find out."""
    with undecided() as context:
        keys = KeyPair.new()
        sockets = {"front": context.socket(zmq.PULL), "engine": context.socket(zmq.PUSH)}
        monitor = sockets[side].get_monitor_socket(event)
        connect(sockets["engine"], KeyPair.new(), listen(sockets["front"], keys, HOST), keys.public)
        assert monitor.poll(TIMEOUT_S * 1000.0)
        file = parse_monitor_message(monitor.recv_multipart())["value"]

        with socket.socket(fileno=os.dup(file)) as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_secret_key_is_not_shown():
    pair = KeyPair.new()

    assert pair.public in repr(pair)
    assert pair.secret.decode() not in repr(pair)
    assert KeyPair.new() != pair
