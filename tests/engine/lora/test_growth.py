"""A server that started without adapters of a kind takes the first one that comes, and serves on meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rota.core.adapter import Extra
from rota.core.config import FirstAdapters
from rota.core.events import AdapterRefused
from rota.engine.families.table import read_spec
from rota.engine.lora.bank import NO_ROOM
from rota.engine.lora.files.checks import HeaderCheck, SlotKind
from rota.engine.lora.growth import SlotGrowth
from tests.engine.lora.features import World, assert_answers_as_peft, only, world_of
from tests.engine.lora.mixed_server import Server, adapter

FEATURES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"use_dora": True},
    3: {"target_modules": ["lm_head", "q_proj"]},
    4: {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
}
PLAIN = FirstAdapters(count=1, rank=4, pages=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("smollm2", tmp_path_factory.mktemp("growth"), FEATURES)


def test_kinds_come_one_after_the_other_and_their_memory_is_counted(world):
    """A plain adapter stays in its slot while the bank grows around it."""
    server = Server(world.model, slots=4, first=PLAIN)
    bank = server.engine._adapters.bank
    sizes = [bank.size_bytes]
    for number, extras in (
        (1, Extra.NONE),
        (2, Extra.GAIN_BIAS),
        (3, Extra.GAIN_BIAS | Extra.HEAD),
        (4, Extra.GAIN_BIAS | Extra.HEAD | Extra.EMBEDDING),
    ):
        assert_answers_as_peft(server, only(world, number))
        assert bank.extras == extras
        sizes.append(bank.size_bytes)
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3] < sizes[4]
    every = FirstAdapters(count=1, rank=4, pages=1, extras=Extra.GAIN_BIAS | Extra.HEAD | Extra.EMBEDDING)
    assert sizes[4] == Server(world.model, slots=4, first=every).engine.capacity.adapter_bytes


def test_an_adapter_for_which_the_device_has_no_memory_is_refused_with_the_numbers(world, monkeypatch):
    monkeypatch.setattr("rota.engine.build.free_memory", lambda _: 1000)
    server = Server(world.model, slots=4, first=PLAIN)
    added = server.add(*(adapter(number, world.adapters) for number in FEATURES))
    refused = {int(event.adapter_id): event.reason for event in added if isinstance(event, AdapterRefused)}
    assert refused.keys() == {2, 3, 4}
    assert "bytes on the device for DoRA or biases in all slots, and 1,000 are free" in refused[2]
    assert "for DoRA or biases and factors of the embedding and factors of the head in all slots" in refused[4]
    assert all("start the server with this adapter among its --lora-paths" in reason for reason in refused.values())


def test_a_bank_that_cannot_grow_refuses_the_adapter_and_serves_on(world, monkeypatch):
    server = Server(world.model, slots=4, first=PLAIN)

    def fail(_: Extra) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(server.engine._adapters.bank, "grow", fail)
    server.add(adapter(2, world.adapters))
    assert_answers_as_peft(server, only(world, 1))
    assert not server.engine._adapters.grow()


def test_a_copy_without_room_says_what_to_do(world):
    server = Server(world.model, slots=4, first=PLAIN)
    bank = server.engine._adapters.bank
    read = server.engine._adapters._loader._reader._read(adapter(2, world.adapters))
    with pytest.raises(Exception, match="among its --lora-paths") as error:
        bank.copy_in(0, read)
    assert str(error.value) == NO_ROOM


def test_ranks_have_what_their_first_adapters_need(world):
    check = HeaderCheck(read_spec(world.model), SlotKind(16, Extra.NONE, ranks=2))
    assert "for which this server's slots have no room; start the server with this adapter" in check(
        adapter(3, world.adapters)
    )


def test_growth_is_due_once():
    growth = SlotGrowth(Extra.HEAD, lambda extras: 10 * int(extras), lambda: 25)
    assert growth.refusal(Extra.HEAD | Extra.GAIN_BIAS) == ""
    assert "needs 30 bytes on the device for DoRA or biases and factors of the embedding" in growth.refusal(
        Extra.GAIN_BIAS | Extra.EMBEDDING
    )
    growth.want(Extra.HEAD)
    assert not growth.due()
    growth.want(Extra.GAIN_BIAS)
    assert growth.refusal(Extra.EMBEDDING) == "", "what is wanted is counted already"
    assert growth.due() == Extra.GAIN_BIAS
    growth.end(has_grown=False)
    assert not growth.due()
    growth.want(Extra.GAIN_BIAS)
    growth.end(has_grown=True)
    assert not growth.due()
