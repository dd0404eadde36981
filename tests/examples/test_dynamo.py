"""Rota as an engine of Dynamo, over stubs of Dynamo: the real one was run by hand, as the example's page says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.examples.dynamo_stubs import Context, InvalidArgumentStub, imported_worker
from tests.tiny_tokenizer import write_byte_tokenizer

FILE = Path(__file__).parents[2] / "examples/dynamo/worker.py"

Scene = Callable[[Any, list[str]], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scene], None]:
    """Plays a scene with an engine that has started, and the names of adapters that it has told Dynamo."""
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2", max_position_embeddings=2**15)
    adapter = make_adapter(tmp_path / "adapter", model)
    registered: list[str] = []
    worker = imported_worker(monkeypatch, registered)
    flags = [str(folder), "--device", "cpu", "--quiet", "--kv-blocks", "2048", "--lora-paths", f"legal={adapter}"]

    async def act(scene: Scene) -> None:
        engine, config = await worker.RotaEngine.from_args(flags)
        assert (config.model_name, config.component) == (str(folder), "rota")
        try:
            started = await engine.start(7)
            assert (started.served_model_name, started.llm.total_kv_blocks) == ("tiny", 2048)
            await engine.on_endpoint_ready(None)
            await scene(engine, registered)
        finally:
            await engine.cleanup()

    return lambda scene: asyncio.run(act(scene))


def request(**fields: Any) -> dict[str, Any]:
    """A request as Dynamo's front end sends it: what the client has not set is None."""
    ten = {"max_tokens": 10, "ignore_eos": True, "stop": None}
    greedy = {"temperature": 0.0, "n": 1, "seed": None}
    return {"token_ids": [65, 66], "model": "tiny", "sampling_options": greedy, "stop_conditions": ten, **fields}


async def told(engine: Any, **fields: Any) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(request(**fields), Context("one"))]


def tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def tell(engine: Any, registered: list[str]) -> None:
    base, legal = await told(engine), await told(engine, model="legal")
    assert registered == ["legal"]
    assert len(tokens(base)) == len(tokens(legal)) == 10
    assert tokens(base) != tokens(legal)
    assert base[-1]["finish_reason"] == "length"
    assert base[-1]["completion_usage"] == {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}


async def refuse(engine: Any, _: list[str]) -> None:
    with pytest.raises(InvalidArgumentStub, match="does not know logprobs"):
        await told(engine, output_options={"logprobs": 1})
    with pytest.raises(InvalidArgumentStub, match="no model or adapter named 'nobody'"):
        await told(engine, model="nobody")
    with pytest.raises(InvalidArgumentStub, match="temperature must be between"):
        await told(engine, sampling_options={"temperature": -1.0})


async def leave(engine: Any, _: list[str]) -> None:
    """No machine computes all tokens that there is room for before the first one is read: they come one by one."""
    client = Context("two")
    answer = engine.generate(request(stop_conditions={"ignore_eos": True}), client)
    assert "finish_reason" not in await anext(answer)
    await engine.abort(client)
    *_, last = [chunk async for chunk in answer]
    assert last["finish_reason"] == "abort"


def test_the_example_stays_thin():
    assert len(FILE.read_text("utf-8").splitlines()) <= 150


def test_an_engine_streams_tokens_of_adapters_by_name_refuses_what_it_does_not_know_and_lets_clients_leave(play):
    async def all_of_it(engine: Any, registered: list[str]) -> None:
        for scene in (tell, refuse, leave):
            await scene(engine, registered)

    play(all_of_it)
