"""The tests of this folder, once more with two replicas behind every server, and with three on a Ray cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.processes import run_program
from tests.server.ray_engines import PLACED
from tests.waiting import TIMEOUT_S

HERE = Path(__file__).parent
# What differs most between one engine and several: where adapters, aborts, queries, streams and limits go.
KEY_TESTS = (
    "test_adapters.py::test_an_adapter_comes_and_goes_while_the_server_runs",
    "test_adapters.py::test_pins_are_kept_and_the_last_slot_is_never_pinned",
    "test_adapters.py::test_an_unload_makes_the_name_unknown_at_once_and_waits_for_whoever_runs",
    "test_adapters.py::test_requests_that_race_with_loads_and_unloads_all_end",
    "test_native.py::test_a_flushed_cache_has_forgotten_earlier_prompts",
    "test_native.py::test_operators_are_told_what_runs_here",
    "test_native.py::test_one_of_several_is_aborted_by_its_own_name",
    "test_requests_route.py::test_a_waiting_request_says_why_since_when_and_how_many_are_before_it",
    "test_streaming.py::test_a_client_that_leaves_is_noticed_while_its_request_still_waits",
    "test_tenants.py::test_keys_that_share_prefixes_find_each_others_prompts_in_both_directions",
)


def with_replicas(replicas: int, *paths: Path | str, backend: str = "local", timeout_s: float) -> str:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    command = [sys.executable, "-m", "pytest", *options, *map(str, paths)]
    environ = {**os.environ, "ROTA_TEST_REPLICAS": str(replicas), "ROTA_TEST_BACKEND": backend}
    return run_program(command, env=environ, timeout=timeout_s).stdout


@pytest.mark.long("part of the tests of the server, which all run with two replicas in the long test below")
def test_key_tests_pass_with_two_replicas():
    assert "100%" in with_replicas(2, *(HERE / name for name in KEY_TESTS), timeout_s=2 * TIMEOUT_S)


@pytest.mark.long("the whole folder runs again, with two replicas behind every server")
def test_all_tests_of_the_server_pass_with_two_replicas():
    assert "100%" in with_replicas(2, HERE, "--ignore", str(Path(__file__)), timeout_s=1700.0)


@pytest.mark.long("the whole folder runs again, with three replicas on a Ray cluster of three nodes")
def test_all_tests_of_the_server_pass_on_ray(monkeypatch, tmp_path):
    marks = tmp_path / "placed"
    monkeypatch.setenv(PLACED, str(marks))
    files = (HERE, "--ignore", str(Path(__file__)), "-n", "2", "--dist", "loadfile")
    assert "100%" in with_replicas(3, *files, backend="ray", timeout_s=1700.0)
    # The other tests hold their device in their own process.
    assert len(marks.read_text()) >= 150, "the engines of fifty servers run there"
