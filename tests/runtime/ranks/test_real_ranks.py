"""Engines that share a tiny model, each in a process of its own, behind an ordinary supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.errors import EngineDiedError, FaultCode
from rota.core.events import FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter
from rota.core.request import Request, SamplingParams
from rota.llm.config import build_device
from rota.llm.llm import LLM
from rota.runtime.in_process import InProcessService
from rota.runtime.service import Service
from rota.runtime.supervisor import SupervisedService
from tests.builders import request, submit
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.fakes import outputs
from tests.processes import is_alive, marked
from tests.runtime.services import Listener, heard
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until

ADAPTERS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("ranks")
    model = make_tiny_model(folder / "model", "qwen3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(folder / str(number), model, seed=number)
    return EngineConfig(
        model=ModelConfig(model_path=str(folder / "model"), dtype="float32", device="cpu"),
        cache=CacheConfig(kv_block_size=8, kv_blocks=128),
        scheduler=SchedulerConfig(max_running_requests=8, chunked_prefill_size=32),
        lora=LoraConfig(max_loras_per_batch=2, max_lora_rank=8),
        quiet=True,
    )


def with_ranks(config: EngineConfig, size: int) -> EngineConfig:
    return replace(config, model=replace(config.model, tensor_parallel_size=size))


@contextmanager
def serving(service: Service, config: EngineConfig) -> Iterator[Listener]:
    with heard(service) as (_, listener):
        for number in range(1, ADAPTERS + 1):
            path = str(Path(config.model.model_path).parent / str(number))
            service.send(
                AddAdapter(adapter=Adapter(adapter_id=AdapterId(number), name=f"a{number}", path=path), at=0.0)
            )
        yield listener


def asked(round: str) -> list[Request]:
    """Greedy ones, and one for each adapter that draws: its seed travels with it."""
    ways: dict[str, dict[str, Any]] = {"greedy": {}, "drawn": {"temperature": 1.2, "seed": 7}}
    return [
        request(
            f"{round}, {number}, {way}", tuple(range(5, 25 + 9 * number)), 12, adapter=AdapterId(number), **sampling
        )
        for number in range(ADAPTERS + 1)
        for way, sampling in ways.items()
    ]


def answers(service: Service, listener: Listener, round: str) -> list[list[int]]:
    requests = asked(round)
    for each in requests:
        service.send(each)
    for each in requests:
        assert listener.wait_for_ending(each.request_id).reason in (FinishReason.LENGTH, FinishReason.STOP)
    return [outputs(listener.events)[each.request_id] for each in requests]


@pytest.fixture(scope="module")
def alone(config) -> list[list[int]]:
    """What one rank answers."""
    service = InProcessService(partial(build_device, config), config)
    with serving(service, config) as listener:
        return answers(service, listener, "alone")


@pytest.mark.long("two processes build an engine each; tests of the engine compare ranks without a server")
def test_two_ranks_answer_as_one(config, alone):
    config = with_ranks(config, 2)
    service = SupervisedService(partial(build_device, config), config)
    with serving(service, config) as listener:
        assert service.wait_until_ready().ranks == 2
        assert answers(service, listener, "first") == alone


@pytest.mark.long("two ranks load torch twice; fake ranks show in two seconds how they start again")
@pytest.mark.parametrize("victim", ["follower", "leader"])
def test_two_ranks_answer_as_one_after_one_of_them_was_killed(config, alone, monkeypatch, victim):
    monkeypatch.setenv("ROTA_TEST_RANKS", mark := f"ranks-{os.getpid()}")
    config = with_ranks(config, 2)
    service = SupervisedService(partial(build_device, config), config)
    with serving(service, config) as listener:
        service.wait_until_ready()
        leader, follower = service.engine_pid, follower_among(marked(mark))
        service.send(submit("open", max_new_tokens=400, ignore_eos=True, adapter=AdapterId(2)))
        listener.wait_for_tokens("open", 3)
        os.kill(leader if victim == "leader" else follower, signal.SIGKILL)

        fault = listener.wait_for_ending("open").fault
        assert fault.code is FaultCode.ENGINE_DIED
        assert "was killed by SIGKILL" in fault.message
        assert answers(service, listener, "again") == alone
        assert not is_alive(leader)
        assert not is_alive(follower)
        last = [service.engine_pid, follower_among(marked(mark))]
    assert until(lambda: not any(map(is_alive, last)))


def follower_among(pids: list[int]) -> int:
    (follower,) = (pid for pid in pids if b"rota.runtime.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return follower


@pytest.mark.long("three processes load torch to refuse one number; fake ranks show the way of the sentence")
def test_sizes_that_cannot_share_the_heads_are_refused_with_those_that_can(config):
    config = with_ranks(config, 3)
    service = SupervisedService(partial(build_device, config), config)
    service.start(Listener())
    with pytest.raises(EngineDiedError, match="tensor_parallel_size"):
        service.wait_until_ready()
    service.stop()


@pytest.mark.long("two ranks load torch once more, for what a service shows too")
def test_an_llm_of_two_ranks_answers_as_one(config):
    write_byte_tokenizer(Path(config.model.model_path))
    prompts, greedy = ["abc", "What is a rank?"], SamplingParams(max_new_tokens=8, temperature=0.0)
    tokens = []
    for size in (1, 2):
        llm = LLM(config.model.model_path, quiet=True, tensor_parallel_size=size, dtype="float32", device="cpu")
        tokens.append([one.token_ids for one in llm.generate(prompts, greedy)])
    assert tokens[0] == tokens[1]
