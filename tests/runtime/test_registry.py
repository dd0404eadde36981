from __future__ import annotations

import pytest

from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.ids import BASE
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry, VersionNumbers


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
        ("poet@7", "ends in .@. and a number, which is how clients ask for one version"),
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


POET = LoraPath(name="poet", path="/adapters/new-poet")


def test_a_name_means_its_old_version_until_it_is_switched(registry):
    old, new = registry.find("poet"), registry.renew(POET)
    assert (old.version, new.version, new.label) == (1, 2, "poet@2")
    assert old.adapter_id != new.adapter_id
    assert registry.find("poet") is old
    assert registry.get("poet@2") is None

    assert registry.switch(new).adapter is old
    assert registry.find("poet") is registry.find("llama:poet@2") is registry.find("poet@2") is new
    assert registry.find("poet@1") is old
    assert registry.versions("poet") == [old, new]
    assert [adapter.name for adapter in registry.adapters] == ["pirate", "poet"]


def test_a_version_that_fails_changes_nothing_and_its_number_is_not_given_again(registry):
    bad = registry.renew(POET)
    registry.discard(bad.adapter_id)

    assert registry.find("poet").version == 1
    assert registry.get("poet@2") is None
    assert registry.renew(POET).version == 3
    with pytest.raises(AdapterError, match="'poet' was unloaded before its new version was read"):
        registry.switch(bad)


def test_a_staged_version_is_asked_for_by_its_number_alone(registry):
    old, staged = registry.find("poet"), registry.renew(POET)
    registry.stage(staged)
    assert registry.find("poet") is old
    assert registry.find("poet@2") is staged
    assert registry.versions("poet") == [staged, old]

    assert registry.switch(staged).adapter is old
    assert registry.versions("poet") == [old, staged]
    assert registry.switch(old).adapter is staged  # a roll-back
    assert registry.find("poet") is old


def test_a_discarded_version_is_gone_and_the_current_one_stays(registry):
    old = registry.find("poet")
    new = registry.renew(POET)
    registry.switch(new)
    registry.discard(old.adapter_id)
    assert registry.versions("poet") == [new]
    assert registry.name_of(old.adapter_id) is None
    with pytest.raises(RequestError, match="no model or adapter named 'poet@1'"):
        registry.find("poet@1")


def test_unloading_a_name_forgets_all_its_versions_and_those_on_their_way(registry):
    registry.switch(registry.renew(POET))
    coming = registry.renew(POET)
    registry.forget("poet")
    assert registry.versions("poet") == []
    with pytest.raises(AdapterError, match="was unloaded before"):
        registry.switch(coming)
    with pytest.raises(AdapterError, match="No adapter named 'poet' is loaded, so there is none to renew"):
        registry.renew(POET)
    assert registry.add(POET).version == 4


@pytest.mark.parametrize("name", ["someone@example.org", "a@", "@b", "v@1.5", "v@²"])
def test_an_at_sign_that_no_number_follows_may_be_in_a_name(registry, name):
    adapter = registry.add(LoraPath(name=name, path="/elsewhere"))
    assert registry.find(name) is registry.find(f"{name}@1") is adapter


def test_a_lost_former_version_does_not_take_the_name(registry):
    old = registry.find("poet")
    new = registry.renew(POET)
    registry.switch(new)
    registry.version(old.adapter_id).loss = Fault(FaultCode.ADAPTER_FAILED, "Its folder is gone.")
    assert registry.find("poet") is new
    with pytest.raises(RequestError, match="Its folder is gone"):
        registry.find("poet@1")


def test_numbers_of_names_that_were_unloaded_long_ago_are_forgotten():
    numbers = VersionNumbers(most_at_rest=1)
    assert [numbers.next("a"), numbers.next("a"), numbers.next("b")] == [1, 2, 1]
    numbers.rest("a")
    assert numbers.next("a") == 3
    numbers.rest("a")
    numbers.rest("b")
    assert [numbers.next("a"), numbers.next("b")] == [1, 2]
