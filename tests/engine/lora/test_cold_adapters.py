"""A cold adapter delays nobody else: however long its read takes, the steps of others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rota.core.adapter import Adapter
from rota.core.events import AdapterAdded, FinishReason
from rota.core.ids import BASE, AdapterId
from rota.core.messages import AddAdapter
from rota.engine import build
from rota.engine.lora.host import HostAdapter
from rota.llm.config import build_device, engine_config
from tests.builders import submit
from tests.engine.lora.adapter_factory import greedy_answer, load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.in_process import InProcessService
from tests.runtime.services import Listener
from tests.waiting import TIMEOUT_S
from tests.worlds import endings, outputs

PROMPT = (5, 9, 77, 130, 4)
WARM, COLD = AdapterId(1), AdapterId(2)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk gives cold adapters only when it is open."""
    opened, reader_for = threading.Event(), build.checkpoint_reader

    def gated(*arguments: Any) -> Callable[[Adapter], HostAdapter]:
        read = reader_for(*arguments)

        def read_behind_gate(adapter: Adapter) -> HostAdapter:
            assert adapter.adapter_id == WARM or opened.wait(TIMEOUT_S)
            return read(adapter)

        return read_behind_gate

    monkeypatch.setattr(build, "checkpoint_reader", gated)
    return opened


def test_others_are_answered_to_their_end_while_a_cold_adapter_is_being_read(gate, tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama3")
    paths = {number: make_adapter(tmp_path / str(number), model, seed=number) for number in (WARM, COLD)}
    right = {number: greedy_answer(load_with_peft(path, model), PROMPT, 12) for number, path in paths.items()}
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4, "max_lora_rank": 8}
    config = engine_config({"model_path": str(tmp_path / "model"), "max_loras_per_batch": 2, **options}, quiet=True)
    service, listener = InProcessService(lambda: build_device(config), config), Listener()
    service.start(listener)
    try:
        for number, path in paths.items():
            adapter = Adapter(adapter_id=number, name=f"a{number}", path=str(path))
            service.send(AddAdapter(adapter=adapter, at=0.0, is_read_later=True))
            listener.wait_for_adapter(number, AdapterAdded)
        for name, adapter_id in (("cold", COLD), ("warm", WARM), ("base", BASE)):
            service.send(submit(name, prompt=PROMPT, max_new_tokens=12, adapter=adapter_id, ignore_eos=True))
        assert listener.wait_for_ending("warm").reason is FinishReason.LENGTH
        assert listener.wait_for_ending("base").reason is FinishReason.LENGTH
        assert "cold" not in endings(listener.events)
        gate.set()
        listener.wait_for_ending("cold")
    finally:
        gate.set()
        service.stop()

    answers = outputs(listener.events)
    assert (answers["warm"], answers["cold"]) == (right[WARM], right[COLD])
