"""A front joins a cluster, asks it for places, and takes no machine that differs from its own."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rota.core.config import EngineConfig, ModelConfig
from rota.core.errors import ConfigError
from rota.core.version import __version__
from rota.runtime.cluster import joining
from rota.runtime.cluster.driver import EngineWhereabouts, ending_of, find
from rota.runtime.cluster.joining import chosen_address, in_one_line, join, own_versions, refusal, unlike, unlike_files
from rota.runtime.cluster.records import Need, Node, Sight, need_of, shortage, waiting
from rota.runtime.ranks.meeting import facts

# ── addresses and refusals ────────────────────────────────────────────────────────────────────────────────────────────


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

    with pytest.raises(ConfigError, match=r"Ray is not installed here: pip install 'ray[<>=.,0-9]+'\."):
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


# ── places ────────────────────────────────────────────────────────────────────────────────────────────────────────────

HEAD = Node("10.0.0.1")
CPUS = Sight((HEAD, Node("10.0.0.2", cpus=8), Node("10.0.0.3", cpus=4)), free_cpus=10)
GPUS = Sight((Node("10.0.0.1", gpus=1, cpus=16), Node("10.0.0.2", gpus=5, cpus=16)), free_gpus=3, free_cpus=32)


@pytest.mark.parametrize(
    ("model", "sight", "need"),
    [
        (ModelConfig(), CPUS, Need(cpus=4)),
        (ModelConfig(cpu_threads=2, tensor_parallel_size=3), CPUS, Need(cpus=6)),
        (ModelConfig(), GPUS, Need(gpus=1)),
        (ModelConfig(tensor_parallel_size=2), GPUS, Need(gpus=2)),
        (ModelConfig(device="cpu"), GPUS, Need(cpus=16)),
        (ModelConfig(device="cuda"), CPUS, Need(gpus=1)),
        (ModelConfig(), Sight((HEAD,)), Need(cpus=1)),
    ],
)
def test_a_replica_needs_the_gpus_of_its_ranks_or_else_processors(model, sight, need):
    assert need_of(model, sight) == need
    assert need.bundle == ({"GPU": need.gpus} if need.gpus else {"CPU": need.cpus})


@pytest.mark.parametrize(
    ("need", "sight", "held", "most_on_one"),
    [
        (Need(cpus=4), CPUS, 3, 2),
        (Need(cpus=5), CPUS, 1, 1),
        (Need(cpus=9), CPUS, 0, 1),
        (Need(gpus=2), GPUS, 2, 2),  # five and one: a replica lies on one machine
        (Need(gpus=1), CPUS, 0, 1),
    ],
)
def test_the_devices_of_a_replica_are_on_one_machine(need, sight, held, most_on_one):
    assert (sight.holds(need), sight.most_on_one(need)) == (held, most_on_one)


def test_what_others_use_is_no_room():
    assert GPUS.has_room_for(Need(gpus=2)) == 1
    assert CPUS.has_room_for(Need(cpus=4)) == 2


def test_a_cluster_that_is_too_small_is_told_what_is_needed_and_what_there_is():
    assert shortage(Need(cpus=4), 3, CPUS) == ""
    assert shortage(Need(cpus=4), 4, CPUS) == (
        "4 replicas are asked for, and each needs 4 CPUs on one machine; the cluster has 8 CPUs on 10.0.0.2, 4 CPUs "
        "on 10.0.0.3 (10 free)."
    )
    assert shortage(Need(gpus=1), 1, CPUS) == "One replica needs 1 GPU on one machine; the cluster has no GPU."


def test_a_replica_without_a_place_says_what_it_waits_for():
    assert waiting(Need(gpus=2), GPUS) == (
        "It has no place to run: it needs 2 GPUs on one machine, and the cluster has 1 GPU on 10.0.0.1, 5 GPUs on "
        "10.0.0.2 (3 free)."
    )


# ── machines that differ, and ends of actors ──────────────────────────────────────────────────────────────────────────


def model_in(folder: Path, weights: bytes = b"w" * 5000) -> EngineConfig:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return EngineConfig(model=ModelConfig(model_path=str(folder)))


def test_a_machine_with_the_versions_of_the_front_is_alike():
    own = own_versions()

    assert {"the version of python", "the version of ray", "the version of Rota", "the version of torch"} <= own.keys()
    assert unlike("10.0.0.2", own, own) == ""


def test_a_machine_with_another_version_is_named_with_both_values():
    own = {"the version of ray": "2.60.0", "the version of torch": "2.12.0"}

    assert unlike("10.0.0.2", own, {"the version of ray": "2.50.0"}) == (
        "Every node must have the model and the versions of the front: node 10.0.0.2 has 2.50.0 for the version of "
        "ray, and the front has 2.60.0; node 10.0.0.2 has nothing for the version of torch, and the front has 2.12.0."
    )


def test_another_fine_tune_at_the_same_path_is_found(tmp_path):
    config = model_in(tmp_path / "model")
    own = facts(config)
    assert unlike_files("10.0.0.2", own, config) == ""

    (tmp_path / "model" / "model.safetensors").write_bytes(b"v" * 5000)
    assert "for the model's weights, and the front has" in unlike_files("10.0.0.2", own, config)


def test_a_machine_without_the_model_is_told_where_it_must_lie(tmp_path):
    config = model_in(tmp_path / "model")
    elsewhere = replace(config, model=replace(config.model, model_path=str(tmp_path / "other")))

    assert unlike_files("10.0.0.2", facts(config), elsewhere) == (
        f"Node 10.0.0.2 has no {tmp_path}/other: the model must lie at the same path on every node."
    )


@pytest.mark.parametrize(
    ("words", "is_alive", "why", "is_refused"),
    [
        (
            "ModuleNotFoundError: No module named 'rota'",
            True,
            f"Node 10.0.0.2 has no Rota that fits: install rota-lora-server[ray] {__version__} there.",
            True,
        ),
        (
            "…\nModuleNotFoundError: No module named 'mine'\n…",
            True,
            "Node 10.0.0.2 has no module mine, of which this server's engines are made.",
            True,
        ),
        ("The actor died: its node failed.", False, "Node 10.0.0.2 of the Ray cluster is gone.", False),
        ("The actor is unavailable: …", True, "Node 10.0.0.2 of the Ray cluster does not answer.", False),
        ("Out of\nmemory.", True, "The engine's actor on node 10.0.0.2 ended: Out of memory.", False),
    ],
)
def test_the_end_of_an_actor_is_one_sentence(words, is_alive, why, is_refused):
    ended = ending_of(7, RuntimeError(words), EngineWhereabouts("10.0.0.2", is_alive))

    assert (ended.number, ended.why, ended.is_refused) == (7, why, is_refused)


PLACED = EngineWhereabouts("10.0.0.2", is_alive=True, node_id="b")


@pytest.mark.parametrize(
    ("bundles", "before", "found"),
    [
        ({}, EngineWhereabouts(), EngineWhereabouts()),
        ({0: "b"}, EngineWhereabouts(), PLACED),
        ({0: ""}, replace(PLACED, node_id="gone"), replace(PLACED, node_id="gone", is_alive=False)),
        (
            {0: "b"},
            EngineWhereabouts("10.0.0.1", is_alive=True, node_id="a"),
            EngineWhereabouts("10.0.0.1", node_id="a"),
        ),
    ],
    ids=["not placed", "placed", "its machine is forgotten", "its machine is dead, and its group has another"],
)
def test_an_engine_was_on_the_machine_that_it_began_on(bundles, before, found, monkeypatch):
    table = SimpleNamespace(placement_group_table=lambda _: {"bundles_to_node_id": bundles})
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", table)
    nodes = [
        {"NodeID": id, "NodeManagerAddress": f"10.0.0.{at}", "Alive": id == "b"} for at, id in ((1, "a"), (2, "b"))
    ]
    assert find(SimpleNamespace(nodes=lambda: nodes), "group", before) == found
