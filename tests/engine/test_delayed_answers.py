"""The prefill delayer decides when prompts start, and changes no token of an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.core.events import PrefillsReleased
from rota.core.policy_config import PolicyConfig
from rota.engine.build import build_engine
from tests.builders import submit
from tests.engine.model_factory import make_tiny_model
from tests.runtime.exchange.loops import loops_of
from tests.waiting import until
from tests.worlds import endings, outputs

REQUESTS = 10


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, "qwen3")
    return EngineConfig(
        model=ModelConfig(model_path=str(folder), dtype="float32", device="cpu"),
        cache=CacheConfig(kv_block_size=8, kv_blocks=200),
        scheduler=SchedulerConfig(max_running_requests=4, chunked_prefill_size=16),
        quiet=True,
    )


@pytest.fixture(scope="module")
def engines(config):
    return [build_engine(config), build_engine(config)]


def answers(config: EngineConfig, engines: list) -> tuple[dict, int]:
    """The tokens of ten requests on each of two engines, and how often prompts were held back."""
    with loops_of(config, engines) as ranks:
        for number, rank in enumerate(ranks):
            for request in range(REQUESTS):
                rank.send(submit(f"{number}-{request}", prompt=3 + 4 * request, max_new_tokens=6 + 5 * (request % 4)))
        assert until(lambda: all(len(endings(rank.events)) == REQUESTS for rank in ranks))
        events = [event for rank in ranks for event in rank.events]
        return outputs(events), sum(isinstance(event, PrefillsReleased) and event.passes > 0 for event in events)


def test_answers_are_token_identical_with_the_delayer_on_and_off(config, engines):
    plain, _ = answers(config, engines)
    assert len(plain) == 2 * REQUESTS
    for kind in ("board", "all-gather"):
        policy = PolicyConfig(
            enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5, prefill_delayer_exchange=kind
        )
        delayed, times = answers(replace(config, policy=policy), engines)
        assert delayed == plain
        assert times > 0, "prompts were held back"
