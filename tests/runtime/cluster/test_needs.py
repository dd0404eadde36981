from __future__ import annotations

import pytest

from rota.core.config import ModelConfig
from rota.runtime.cluster.records import Need, Node, Sight, need_of, shortage, waiting

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
