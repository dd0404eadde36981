"""An LLM object takes addresses for paths, and looks for names below a resolver's prefix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rota import LLM, SamplingParams
from rota.core.errors import AdapterError, RequestError
from tests.engine.lora.adapter_factory import change_config, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.sources.hub_server import HubServer, hub_server
from tests.tiny_tokenizer import write_byte_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
OPTIONS = {"quiet": True, "device": "cpu", "kv_blocks": 16, "max_running_requests": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(folder, "smollm2")
    for seed, name in enumerate(("poet", "team/legal", "odd")):
        make_adapter(folder / "adapters" / name, model, seed=seed)
    change_config(folder / "adapters" / "odd", peft_type="LOHA")
    return write_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def hub(folder) -> Iterator[HubServer]:
    with hub_server() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        for name in ("poet", "odd"):
            hub.put(f"acme/{name}", {path.name: path.read_bytes() for path in (folder / "adapters" / name).iterdir()})
        yield hub


@pytest.fixture(scope="module")
def near(folder) -> LLM:
    """With a folder as its resolver's prefix."""
    adapters = {"poet": folder / "adapters" / "poet"}
    return LLM(folder, adapters=adapters, lora_resolver=str(folder / "adapters"), **OPTIONS)


def said(llm: LLM, adapter: str | None) -> tuple[int, ...]:
    (answer,) = llm.generate("one", GREEDY, adapter=adapter)
    return tuple(answer.token_ids)


def test_adapters_of_the_hub_are_served_at_the_start_and_later(folder, hub, near, tmp_path):
    far = LLM(folder, adapters={"first": "hf://acme/poet"}, adapter_cache_dir=str(tmp_path), **OPTIONS)
    far.load_adapter("later", "acme/poet")
    assert said(far, "first") == said(far, "later") == said(near, "poet") != said(near, None)
    names = [name for name, _ in hub.downloads()]
    # Outlines of what it needs and of whether it can be served, then one download for both.
    assert names == ["adapter_config.json", "adapter_model.safetensors"] * 3


@pytest.mark.usefixtures("hub")
def test_what_is_wrong_with_a_source_is_told_and_the_name_stays_free(folder, near, tmp_path):
    far = LLM(folder, adapter_cache_dir=str(tmp_path), **OPTIONS)
    with pytest.raises(AdapterError, match="There is nothing at hf://acme/none"):
        far.load_adapter("poet", "hf://acme/none")
    with pytest.raises(AdapterError, match=r"^hf://acme/odd/adapter_config.json describes a PEFT adapter of type"):
        far.load_adapter("poet", "hf://acme/odd")
    assert list(tmp_path.rglob("*")) == []
    far.load_adapter("poet", "hf://acme/poet")
    assert said(far, "poet") == said(near, "poet")


def test_a_name_that_is_not_known_is_loaded_from_below_the_prefix(near):
    assert said(near, "team/legal") not in (said(near, None), said(near, "poet"))
    for name in ("none", "../adapters/poet", "team"):
        with pytest.raises(RequestError, match="There is no model or adapter named"):
            said(near, name)
    with pytest.raises(AdapterError, match="LOHA"):
        said(near, "odd")


@pytest.mark.usefixtures("hub")
def test_a_prefix_may_be_an_address(folder, near, tmp_path):
    far = LLM(folder, lora_resolver="hf://acme", adapter_cache_dir=str(tmp_path), **OPTIONS)
    assert said(far, "poet") == said(near, "poet")
    with pytest.raises(RequestError, match="There is no model or adapter named 'none'"):
        said(far, "none")
