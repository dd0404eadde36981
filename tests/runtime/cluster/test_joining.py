from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from rota.core.errors import ConfigError
from rota.runtime.cluster import joining
from rota.runtime.cluster.joining import chosen_address, in_one_line, join, refusal


@pytest.mark.parametrize(
    ("asked", "environ", "chosen"),
    [
        (None, {}, "auto"),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.1:6379"),
        ("10.0.0.2:6379", {"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.2:6379"),
        ("auto", {}, "auto"),
        ("[::1]:6379", {}, "[::1]:6379"),
    ],
)
def test_the_cluster_is_the_named_one_or_that_of_this_machine(asked, environ, chosen):
    assert chosen_address(asked, environ) == chosen


@pytest.mark.parametrize("address", ["local", "ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:head", ":6379"])
def test_an_address_that_is_no_clusters_is_refused(address):
    with pytest.raises(ConfigError, match=r"must be HOST:PORT or 'auto'\. Start a cluster with `ray start --head`"):
        chosen_address(address, {})


def test_without_ray_the_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(joining, "find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=r"Ray is not installed here: pip install 'rota\[ray\]'\."):
        chosen_address(None, {})


class Ray(SimpleNamespace):
    """Ray, of which one call fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error=error, was_shut_down=False)

    def init(self, **options: object) -> None:
        raise self.error

    def shutdown(self) -> None:
        self.was_shut_down = True


def test_a_cluster_that_cannot_be_reached_is_not_asked_for_long():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens there
        ray = Ray(AssertionError("not asked"))
        reason = join(ray, f"127.0.0.1:{held.getsockname()[1]}")

    assert "cannot be joined" in reason
    assert "refused" in reason
    assert "ray start --head" in reason
    assert ray.was_shut_down


def test_a_machine_without_a_cluster_is_told_how_to_get_one():
    reason = join(Ray(ConnectionError("Could not find any running Ray instance.")), "auto")

    assert reason.startswith("This machine belongs to no Ray cluster that runs. Start a cluster with")


def test_other_versions_are_named():
    words = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1\nThis process …\n"

    assert refusal("auto", RuntimeError(words)) == (
        "The Ray cluster at auto has other versions than this machine. Version mismatch: The cluster was started "
        "with: Ray: 2.50.0 Python: 3.12.1 This process …"
    )


def test_a_cluster_that_answers_and_refuses_may_want_a_token():
    reason = refusal("10.0.0.1:6379", ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"))

    assert reason.startswith("The Ray cluster at 10.0.0.1:6379 does not let this server in (Failed to connect")
    assert "RAY_AUTH_MODE=token" in reason


def test_a_long_message_becomes_one_short_line():
    assert in_one_line("a\n  b\tc") == "a b c"
    assert in_one_line("x" * 30, most=10) == "xxxxxxxxxx…"
