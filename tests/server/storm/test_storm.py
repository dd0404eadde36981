"""Whatever happens to versions, routes, clients and engines: each answer is PEFT's with the versions it names."""

from __future__ import annotations

import pytest

from tests.server.storm.library import make_library
from tests.server.storm.replica_storm import ReplicaStorm
from tests.server.storm.storm import Storm, brew


@pytest.fixture(scope="module", autouse=True)
def _library(tmp_path_factory: pytest.TempPathFactory) -> None:
    Storm.library = make_library(tmp_path_factory.mktemp("storm"))


def test_a_storm_mixes_nothing_and_leaves_nothing():
    brew(Storm, examples=10, steps=25)


@pytest.mark.long("many more storms are long too; one without replicas is not")
def test_a_storm_over_replicas_mixes_nothing_and_leaves_nothing():
    brew(ReplicaStorm, examples=6, steps=25)


@pytest.mark.long("the same storm, for minutes")
def test_many_storms_mix_nothing_and_leave_nothing():
    brew(Storm, examples=150, steps=40)


@pytest.mark.long("the same storm over replicas, for minutes")
def test_many_storms_over_replicas_mix_nothing_and_leave_nothing():
    brew(ReplicaStorm, examples=120, steps=40)
