"""How many connections a server takes, and the one line a minute that it writes about others."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from rota.core.config import ListenConfig
from rota.core.errors import ConfigError
from rota.observe.meters import Closure, ConnectionMeters, ConnectionRefusal
from rota.server.door.book import (
    ConnectionBook,
    ConnectionLimits,
    ConnectionLog,
    few_connections,
    find_limits,
    group_of,
)
from tests.processes import run_program


def test_the_limit_of_open_files_leaves_a_reserve_and_half_is_for_one_address():
    limits = find_limits(ListenConfig(), open_files=1064)

    assert (limits.in_all, limits.per_address) == (1000, 500)


def test_without_a_limit_of_open_files_there_is_one_of_connections():
    assert find_limits(ListenConfig(), open_files=2**20).in_all == 16_384


def test_more_connections_than_open_files_are_refused_with_the_command_that_helps():
    with pytest.raises(ConfigError, match=r"may open 200 files.*ulimit -n 1064"):
        find_limits(ListenConfig(max_connections=1000), open_files=200)


def test_few_open_files_are_said_at_the_start_unless_the_operator_chose_the_number():
    for config, advice in ((ListenConfig(), "at most 136 connections"), (ListenConfig(max_connections=100), "")):
        assert advice in few_connections(config, find_limits(config, 200), 200)
    assert not few_connections(ListenConfig(), find_limits(ListenConfig(), 1024), 1024)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_connections": 0}, "max_connections must be at least 1"),
        ({"head_timeout": 0.0}, "head_timeout must be a finite number above 0"),
        ({"trusted_proxies": ("proxy.local",)}, "trusted_proxies has 'proxy.local'; give addresses or networks"),
        ({"ssl_keyfile": "key"}, "ssl_keyfile is given without ssl_certfile"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        ListenConfig(**options)


def test_addresses_of_one_ipv6_network_count_as_one():
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:2%eth0") != group_of("2001:db8:0:1::1")
    assert group_of("::ffff:10.0.0.7") == group_of("10.0.0.7") != group_of("10.0.0.8")


def test_a_busy_connection_that_becomes_idle_is_the_last_to_give_way():
    async def run() -> list[str]:
        book = ConnectionBook(ConnectionLimits(in_all=2, per_address=2), ConnectionMeters())
        closed: list[str] = []
        first, second = book.admit("10.0.0.1"), book.admit("10.0.0.1")
        first.close, second.close = (lambda: closed.append("first")), (lambda: closed.append("second"))
        first.busy()
        first.idle()
        assert book.admit("10.0.0.2") is not None
        second.idle()  # it does not know yet that it was closed
        second.gone()
        return closed

    assert asyncio.run(run()) == ["second"]


def test_a_minute_has_one_line_with_all_counts(caplog, monkeypatch):
    monkeypatch.setattr("rota.server.door.book.GATHER_S", 0.0)
    said = asyncio.Event()
    caplog.handler.addFilter(lambda _: said.set() or True)

    async def run() -> None:
        log = ConnectionLog(ConnectionMeters(open=7, most=8), lambda: "10.0.0.1 (5 open)")
        for _ in range(3):
            log.refused(ConnectionRefusal.ADDRESS)
        log.closed(Closure.SLOW_BODY)
        await said.wait()
        log.refused(ConnectionRefusal.ALL)
        await asyncio.sleep(0.05)  # a second line would come at once
        assert len(caplog.records) == 1
        log.write()

    with caplog.at_level(logging.WARNING, "rota.server"):
        asyncio.run(run())

    always = {"open": 7, "limit": 8, "busiest": "10.0.0.1 (5 open)"}
    assert [record.fields for record in caplog.records] == [
        {"refused_address": 3, "slow_body": 1} | always,
        {"refused_all": 1} | always,
    ]


@pytest.mark.parametrize(("hard", "enough", "limit"), [(400, 300, 300), (400, 1000, 400), (400, 100, 200)])
def test_a_process_raises_its_limit_of_open_files_as_far_as_it_is_of_use(hard, enough, limit):
    script = f"""
import resource
from rota.server.door.book import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))
print(raise_open_files({enough}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    assert run_program([sys.executable, "-c", script]).stdout.split() == [str(limit)] * 2
