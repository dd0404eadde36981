"""An engine tells what it does while it is built, and knows then how long tokens take."""

from __future__ import annotations

from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.engine.build import build_engine
from rota.start import START
from tests.engine.model_factory import make_tiny_model


def test_a_built_engine_has_told_of_its_work_and_has_timed_its_tokens(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(START, "tell_progress", told.append)
    make_tiny_model(tmp_path, "llama3")
    config = EngineConfig(
        model=ModelConfig(model_path=str(tmp_path), device="cpu"),
        cache=CacheConfig(kv_blocks=8),
        scheduler=SchedulerConfig(max_running_requests=2),
        quiet=True,
    )
    engine = build_engine(config)
    engine.close()

    assert {f"Loading {tmp_path.name}", "Warming up"} <= set(told)
    assert 0.0 < engine.capacity.token_s < 60.0
    assert 0.0 < engine.capacity.decode_s < 60.0
