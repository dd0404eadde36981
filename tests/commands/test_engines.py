from __future__ import annotations

from dataclasses import replace

import pytest

from rota.commands import engines
from rota.commands.engines import counted, described_replicas, engine_service, replica_configs, spare_imports
from rota.core.config import EngineConfig, ModelConfig, ServerConfig
from rota.core.errors import ConfigError
from rota.llm.llm import LLM
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.supervisor import SupervisedService
from tests.builders import capacity
from tests.fakes import FakeDevice


def config(replicas: int, ranks: int = 1) -> EngineConfig:
    return EngineConfig(model=ModelConfig(data_parallel_size=replicas, tensor_parallel_size=ranks))


def test_each_replica_has_its_number_and_the_first_of_its_own_devices():
    three = replica_configs(config(3, ranks=2))

    assert [(one.engine_id, one.device_number) for one in three] == [(0, 0), (1, 2), (2, 4)]
    assert [one.quiet for one in three] == [False, True, True], "progress of one replica is shown"
    assert {replace(one, engine_id=0, device_number=0, quiet=False) for one in three} == {config(3, ranks=2)}


@pytest.mark.parametrize(("replicas", "kind"), [(1, SupervisedService), (2, ReplicatedService)])
def test_one_engine_is_its_own_service(replicas, kind):
    service = engine_service(config(replicas), ServerConfig(), lambda _: FakeDevice())

    assert isinstance(service, kind)
    assert [engine.engine_id for engine in service.state.engines] == [*range(replicas)]


@pytest.mark.parametrize(
    ("asked", "device", "is_kept"),
    [
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("auto", None, False),
        ("on", "cpu", True),
        ("off", "cuda", False),
    ],
)
def test_a_spare_is_kept_for_a_gpu_or_when_asked_for(asked, device, is_kept):
    assert (spare_imports(asked, replace(capacity(), device=device)) is not None) == is_kept


def test_an_engine_on_ray_has_no_spare():
    on_ray = EngineConfig(model=ModelConfig(data_parallel_backend="ray"))

    with pytest.raises(
        ConfigError, match="spare_engine is 'on', but the next engine on Ray may run on another machine"
    ):
        engine_service(on_ray, ServerConfig(spare_engine="on"), lambda _: FakeDevice())


def test_the_start_says_how_many_replicas_there_are():
    def said(replicas: int) -> str:
        return described_replicas(engine_service(config(replicas), ServerConfig(), lambda _: FakeDevice()).state)

    assert said(1) == ""
    assert said(2) == "2 replicas of the model share the requests."


def test_an_llm_object_is_one_copy_of_the_model():
    with pytest.raises(ConfigError, match="data_parallel_size is 2, but an LLM object is one copy of the model"):
        LLM("/nowhere", data_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_backend is 'ray', but an LLM object computes in this process"):
        LLM("/nowhere", data_parallel_backend="ray")


def test_auto_is_one_replica_on_a_cpu_and_is_left_to_the_cluster_on_ray():
    auto = ModelConfig(data_parallel_size="auto", device="cpu")
    assert counted(EngineConfig(model=auto)).model.replicas == 1

    on_ray = EngineConfig(model=replace(auto, data_parallel_backend="ray"))
    assert counted(on_ray) == on_ray


@pytest.mark.parametrize(("gpus", "ranks", "replicas"), [(8, 2, 4), (3, 2, 1), (0, 1, 1)])
def test_auto_is_as_many_replicas_as_the_gpus_of_this_machine_hold(monkeypatch, gpus, ranks, replicas):
    monkeypatch.setattr(engines, "_COUNT_GPUS", f"print({gpus})")
    auto = ModelConfig(data_parallel_size="auto", tensor_parallel_size=ranks)

    assert counted(EngineConfig(model=auto)).model.replicas == replicas
