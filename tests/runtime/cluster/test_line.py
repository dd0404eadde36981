"""A line between front and engine: nobody reads along, no stranger gets in, and one that breaks is not mended."""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from rota.core.events import AdapterAdded, FinishReason
from rota.runtime.cluster.line import QUIET_S, GuardedLine, KeyPair, StrangerLog, Visitors, connect, listen
from rota.runtime.service import BuildDevice
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice
from tests.processes import is_alive
from tests.runtime.cluster.between import (
    PlainDevice,
    relays,
    speak_plainly,
    with_a_giant,
    with_another_key,
    with_another_key_of_the_port,
    with_keys,
    with_noise,
    without_keys,
)
from tests.runtime.cluster.elsewhere import HOST, Elsewheres
from tests.runtime.services import LONG, SLOW, supervised
from tests.waiting import TIMEOUT_S, until

# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── what can be read on the way ───────────────────────────────────────────────────────────────────────────────────────

PROMPT = tuple(range(97, 123))
REQUEST, NAME, PATH = "request-of-a-patient", "adapter-of-a-clinic", "adapters/of/a/clinic"
SECRETS = {
    "prompt": bytes(PROMPT),  # as msgpack writes such small numbers
    "request": REQUEST.encode(),
    "name": NAME.encode(),
    "path": PATH.encode(),
}


def captured(build_device: BuildDevice) -> tuple[bytes, bytes]:
    """All bytes between front and engine while a request of an adapter is served, and the front's secret key."""
    with relays() as between:
        elsewheres = Elsewheres(between.detour)
        with supervised(build_device, new_engine=elsewheres.new_engine) as (service, listener):
            adapter = add_adapter(1, name=NAME, path=PATH)
            service.send(adapter)
            listener.wait_for_adapter(1, AdapterAdded)
            service.send(submit(REQUEST, prompt=PROMPT, adapter=adapter.adapter.adapter_id))
            assert listener.wait_for_ending(REQUEST).reason is FinishReason.LENGTH
            secret = service._engine._line._keys.secret
        assert len(between.all) == 2, "both ways were recorded"
        return between.seen, secret


def found(capture: bytes) -> set[str]:
    return {name for name, secret in SECRETS.items() if secret in capture}


def test_a_capture_holds_no_prompt_no_name_and_no_key():
    capture, secret = captured(FakeDevice)

    assert len(capture) > 1000
    assert found(capture) == set()
    assert secret not in capture
    assert z85.decode(secret) not in capture


def test_without_keys_the_same_capture_would_hold_them(monkeypatch: pytest.MonkeyPatch):
    speak_plainly(monkeypatch)

    capture, _ = captured(PlainDevice())

    assert found(capture) == SECRETS.keys()


# ── strangers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# Both sides notice that one has no key, and either may be the first to hang up.
NO_KEY = r"It (has no key|left before it had shown a key)\."


@contextmanager
def guarded():
    """A line that listens, its address, and the keys of the one who may come."""
    context, guest = zmq.Context(), KeyPair.new()
    line = GuardedLine(context, on_lost=lambda: None)
    address = line.listen(HOST)
    line.expect(guest.public)
    try:
        yield line, address, guest
    finally:
        line.close()
        context.destroy(linger=0)


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "tranger" in record.getMessage()]


@pytest.mark.parametrize(
    ("intruder", "why"),
    [
        (without_keys, NO_KEY),
        (with_another_key, "Its key is not the one that is expected."),
        (with_another_key_of_the_port, "It does not know the key of this port."),
        (with_a_giant, "It (left before it had shown a key|does not speak the language of this port)."),
        (with_noise, "It does not speak the language of this port."),
    ],
)
def test_a_stranger_is_turned_away_and_one_line_is_logged(caplog, intruder, why):
    with guarded() as (line, address, guest):
        assert not intruder(address, line.public_key)
        assert until(lambda: lines(caplog))
        assert not line.inbox.poll(0)

        assert with_keys(guest)(address, line.public_key)  # so that the check can fail
        [line] = lines(caplog)
        assert re.fullmatch(f"A stranger at {address} was turned away. {why}", line)


def test_until_a_guest_is_expected_nobody_gets_in():
    context = zmq.Context()
    line = GuardedLine(context, on_lost=lambda: None)
    address = line.listen(HOST)

    assert not with_another_key(address, line.public_key)
    line.close()
    context.destroy(linger=0)


def test_a_port_scan_is_told_in_two_lines(caplog):
    now = [0.0]
    log = StrangerLog(clock=lambda: now[0])
    log.port = "tcp://10.0.0.7:4000"
    for _ in range(1000):
        log.turned_away("It has no key.")
        now[0] += 1 / 128
    assert lines(caplog) == ["A stranger at tcp://10.0.0.7:4000 was turned away. It has no key."]
    assert log.left_s == QUIET_S - 1000 / 128

    now[0] = QUIET_S
    assert log.left_s == 0.0
    log.say_rest()
    assert lines(caplog)[1:] == ["Strangers at tcp://10.0.0.7:4000 were turned away 999 more times."]
    log.say_rest()
    assert len(lines(caplog)) == 2


def test_a_guest_that_leaves_is_no_stranger():
    visitors = Visitors()
    story = [
        (zmq.EVENT_ACCEPTED, 7),
        (zmq.EVENT_HANDSHAKE_SUCCEEDED, 0),
        (zmq.EVENT_ACCEPTED, 8),
        (zmq.EVENT_DISCONNECTED, 7),
    ]
    assert not any(visitors.note(*event) for event in story)
    assert visitors.note(zmq.EVENT_DISCONNECTED, 8)  # the other has not even begun a handshake


def test_a_stranger_is_told_of_once_though_it_fails_and_leaves():
    visitors = Visitors()
    visitors.note(zmq.EVENT_ACCEPTED, 7)

    assert visitors.note(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400) == "Its key is not the one that is expected."
    assert visitors.note(zmq.EVENT_DISCONNECTED, 7) == ""
    visitors.note(zmq.EVENT_ACCEPTED, 7)
    assert visitors.note(zmq.EVENT_DISCONNECTED, 7) != ""


def test_strangers_at_both_ports_of_a_service_get_nothing_and_it_goes_on_serving(caplog, capfd):
    elsewheres = Elsewheres()
    with supervised(SLOW, new_engine=elsewheres.new_engine) as (service, listener):
        service.wait_until_ready()
        old = service._engine._line._keys
        os.kill(service.engine_pid, signal.SIGKILL)
        assert until(lambda: len(elsewheres.all) == 2)
        service.send(submit("open", max_new_tokens=100))
        listener.wait_for_tokens("open")
        pid, second = service.engine_pid, elsewheres.all[1]
        front = (second.invitation.events, second.invitation.front_key)
        engine = (second.joined.messages, second.joined.engine_key)

        for address, key in (front, engine):
            for intruder in (without_keys, with_another_key, with_keys(old), with_noise):
                assert not intruder(address, key)

        assert listener.wait_for_ending("open").reason is FinishReason.LENGTH
        assert service.engine_pid == pid
        assert len(lines(caplog)) == 1
        assert re.fullmatch(f"A stranger at {front[0]} was turned away. {NO_KEY}", lines(caplog)[0])
    told, rest = [line for line in capfd.readouterr().err.splitlines() if engine[0] in line]
    assert re.fullmatch(f"A stranger at {engine[0]} was turned away. {NO_KEY}", told)
    assert re.fullmatch(f"Strangers at {engine[0]} were turned away [0-9]+ more times.", rest)


# ── lines that break ──────────────────────────────────────────────────────────────────────────────────────────────────

EVENTS, MESSAGES = 0, 1  # which relay: the front's address is told first


@pytest.mark.parametrize(
    ("what", "line", "reason"),
    [
        ("cut", EVENTS, "The connection to the engine on 127.0.0.1 broke."),
        ("cut", MESSAGES, "The connection to the engine on 127.0.0.1 broke."),
        ("hold", EVENTS, "The engine hung: it said nothing for 2 seconds."),
    ],
)
def test_a_line_that_breaks_is_not_mended(what, line, reason):
    with relays() as between:
        elsewheres = Elsewheres(between.detour)
        with supervised(SLOW, EngineTimeouts(silence_s=2.0), elsewheres.new_engine) as (service, listener):
            service.send(submit("lost", max_new_tokens=LONG))
            listener.wait_for_tokens("lost")
            first = service.engine_pid
            getattr(between.all[line], what)()

            assert listener.wait_for_ending("lost").fault.message.startswith(reason)
            service.send(submit("again"))
            assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
            assert not is_alive(first)
