from __future__ import annotations

import pytest

from rota.core.errors import AdapterError, FaultCode, RequestError
from rota.core.ids import BASE
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry


@pytest.fixture
def registry() -> Registry:
    registry = Registry("llama", "/models/llama")
    registry.add(LoraPath(name="pirate", path="/adapters/pirate", is_pinned=True, weight=2.0))
    registry.add(LoraPath(name="poet", path="/adapters/poet"))
    return registry


@pytest.mark.parametrize("model", [None, "llama"])
def test_the_base_model_is_asked_for_by_its_name_or_by_none(registry, model):
    assert registry.find(model).adapter_id == BASE


@pytest.mark.parametrize("model", ["poet", "llama:poet"])
def test_an_adapter_is_asked_for_by_its_name_alone_or_after_the_base_models(registry, model):
    assert registry.find(model).path == "/adapters/poet"


def test_an_adapter_may_have_a_colon_in_its_name(registry):
    adapter = registry.add(LoraPath(name="other:poet", path="/adapters/other"))
    assert registry.find("other:poet") == registry.find("llama:other:poet") == adapter


@pytest.mark.parametrize(
    "model", ["gpt-9", "llama:gpt-9", "other:poet", "llama:llama", "llama:llama:poet", "llama:", ""]
)
def test_an_unknown_name_is_refused_with_the_known_ones(registry, model):
    with pytest.raises(RequestError, match="known are: llama, pirate, poet") as refusal:
        registry.find(model)
    assert refusal.value.fault.code is FaultCode.UNKNOWN_MODEL


def test_what_was_asked_for_an_adapter_is_kept(registry):
    pirate = registry.find("pirate")
    assert (pirate.is_pinned, pirate.weight) == (True, 2.0)
    assert [adapter.name for adapter in registry.adapters] == ["pirate", "poet"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("poet", "already loaded"),
        ("llama", "base model's"),
        (" ", "needs a name"),
        ("base", "cannot be called 'base': metrics and logs use that word for something else; take another name"),
        ("other", "cannot be called 'other'"),
        ("llama:poet", "'llama:poet' begins with 'llama:', which clients may write before any adapter's name; take"),
        ("llama:new", "begins with 'llama:'"),
    ],
)
def test_a_name_that_cannot_be_given_is_refused(registry, name, words):
    with pytest.raises(AdapterError, match=words):
        registry.add(LoraPath(name=name, path="/elsewhere"))
    assert [adapter.path for adapter in registry.adapters] == ["/adapters/pirate", "/adapters/poet"]


def test_a_forgotten_name_is_unknown_and_gets_a_new_id_when_it_is_loaded_again(registry):
    before = registry.forget("poet")
    with pytest.raises(RequestError):
        registry.find("poet")
    with pytest.raises(AdapterError, match="No adapter named 'poet' is loaded; loaded are: pirate"):
        registry.forget("poet")
    after = registry.add(LoraPath(name="poet", path="/adapters/poet"))

    assert after.adapter_id not in (before.adapter_id, registry.find("pirate").adapter_id, BASE)
    assert registry.has(after)
    assert not registry.has(before)


def test_discarding_an_id_leaves_a_later_adapter_of_the_same_name_alone(registry):
    before = registry.forget("poet")
    after = registry.add(LoraPath(name="poet", path="/adapters/poet"))
    registry.discard(before.adapter_id)
    assert registry.has(after)

    registry.discard(after.adapter_id)
    assert not registry.has(after)
