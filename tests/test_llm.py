"""An LLM object answers prompts in a program, with adapters from folders and from addresses."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from rota import LLM, SamplingParams
from rota.core.config import EngineConfig, LoraConfig
from rota.core.errors import AdapterError, ConfigError, ModelError, RequestError
from rota.core.lora_paths import LoraPath
from rota.engine.folders.builtin import builtin_adapters
from rota.llm.config import build_device, engine_config, first_adapters, locate_model, with_first
from tests.engine.lora.adapter_factory import change_config, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.terminal import Terminal
from tests.processes import marked
from tests.sources.hub_server import HubServer, hub_server
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(folder, "smollm2")
    make_adapter(folder / "poet", model)
    return write_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, quiet=True, device="cpu", kv_blocks=64, max_running_requests=4)


def test_every_prompt_is_continued_in_its_order(llm):
    together = llm.generate(["one", "another", "a third one"], GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in ("one", "another", "a third one")]

    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.prompt_tokens for answer in together] == [3, 7, 11]
    assert {answer.finish_reason for answer in together} == {"length"}


def test_tokens_are_as_good_as_text(llm):
    assert llm.generate([list(b"one")], GREEDY) == llm.generate("one", GREEDY)


def test_the_text_is_that_of_the_tokens(llm):
    (answer,) = llm.generate("one", GREEDY)
    assert answer.text == bytes(token for token in answer.token_ids if token > 2).decode("utf-8", "replace")


def test_a_stop_string_ends_the_text_before_it(llm):
    (whole,) = llm.generate("one", GREEDY)
    stop = whole.text[5:7]
    before = whole.text[: whole.text.index(stop)]
    (stopped, other) = llm.generate(
        ["one", "one"], [SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True, stop=(stop,)), GREEDY]
    )

    assert (stopped.text, stopped.finish_reason) == (before, "stop")
    assert len(stopped.token_ids) < len(whole.token_ids)
    assert other.text == whole.text


def test_a_token_that_ends_the_answer_stops_it(llm):
    (whole,) = llm.generate("one", GREEDY)
    third = whole.token_ids[2]
    (stopped,) = llm.generate(
        "one", SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({third}))
    )

    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]
    assert stopped.finish_reason == "stop"


def test_a_seed_repeats_an_answer_and_without_one_each_prompt_draws_its_own(llm):
    once, again = (llm.generate("one", SamplingParams(max_new_tokens=12, ignore_eos=True, seed=5)) for _ in range(2))
    first, second = llm.generate(["one", "one"], SamplingParams(max_new_tokens=12, ignore_eos=True))

    assert once == again
    assert first.token_ids != second.token_ids


def test_a_prompt_asked_again_finds_its_kv(llm):
    prompt = "a prompt of more than sixteen tokens"
    llm.generate(prompt, GREEDY)

    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 32


def test_logprobs_come_with_every_token(llm):
    (answer,) = llm.generate("one", SamplingParams(temperature=0.0, max_new_tokens=3, logprobs=2, ignore_eos=True))

    assert len(answer.logprobs) == 3
    assert all(
        entry.top[0] == (token, entry.chosen) for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    )


def test_a_prompt_s_own_tokens_are_scored_if_asked(llm):
    greedy = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    (answer,) = llm.generate("one", SamplingParams(**greedy))
    continued = [*b"one", *answer.token_ids]
    (scored,) = llm.generate([continued], SamplingParams(**greedy, prompt_logprobs=1))

    assert len(scored.prompt_logprobs) == 3
    assert scored.prompt_logprobs[-1].top == ((continued[-1], scored.prompt_logprobs[-1].chosen),)


def test_positions_are_held_for_the_context_that_is_served_not_for_all_the_model_allows(tmp_path):
    make_tiny_model(tmp_path, "smollm2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 16, "max_running_requests": 2, "context_length": 40}
    with LLM(write_byte_tokenizer(tmp_path), quiet=True, **options) as short:
        (answer,) = short.generate("x" * 30, SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True))
    engine = build_device(with_first(engine_config({"model_path": str(tmp_path), **options}, quiet=True), []))

    assert len(answer.token_ids) == 10  # up to the last position there is
    assert {len(table) for table in engine._model._rotaries} == {40}
    engine.close()


def test_a_conversation_goes_through_the_chat_template(llm):
    message = {"role": "user", "content": "one"}

    assert llm.chat([message], GREEDY)[0].token_ids == llm.generate("one|", GREEDY)[0].token_ids
    assert len(llm.chat([[message], [message]], GREEDY)) == 2


def test_a_prompt_that_is_too_long_is_named_and_the_model_goes_on(llm):
    with pytest.raises(RequestError, match="Prompt 1: The prompt is too long: 600 tokens"):
        llm.generate(["fine", "x" * 600, "fine too"], GREEDY)

    assert llm.generate("one", GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[1, 999]], None, "A prompt holds 999"),
        (["a", "b"], [GREEDY], "2 prompts, but the list of params has 1"),
        ("", None, "prompt is empty"),
    ],
)
def test_what_cannot_be_asked_is_refused(llm, prompts, params, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)


def test_an_unknown_option_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="kv_blok_size is not an option; did you mean kv_block_size"):
        LLM("/nowhere", kv_blok_size=16)


def test_a_missing_model_is_refused_with_its_path():
    with pytest.raises(ModelError, match="/nowhere"):
        LLM("/nowhere")


def test_a_progress_bar_counts_the_prompts_on_a_terminal_unless_quiet(folder, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    LLM(folder, device="cpu", kv_blocks=16, max_running_requests=2).generate(["one", "two"], GREEDY)
    assert "Answering:" in terminal.getvalue()
    assert "/2 [" in terminal.getvalue()
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    LLM(folder, quiet=True, device="cpu", kv_blocks=16, max_running_requests=2).generate("one", GREEDY)
    assert terminal.getvalue() == ""


def test_an_adapter_is_given_by_name_or_as_the_flag_of_the_server_says(folder):
    options = {"quiet": True, "device": "cpu", "kv_blocks": 16, "max_running_requests": 2}
    named = LLM(folder, adapters={"poet": folder / "poet"}, **options)
    flagged = LLM(folder, lora_paths=[str(folder / "poet")], **options)
    base, tuned = named.generate(["one", "one"], GREEDY, adapter=[None, "poet"])

    assert base.token_ids != tuned.token_ids
    assert flagged.generate("one", GREEDY, adapter="poet") == [tuned]
    with pytest.raises(AdapterError, match="already loaded"):
        named.load_adapter("poet", folder / "poet")
    with pytest.raises(AdapterError, match="cannot be called 'base'"):
        LLM(folder, lora_paths=[f"base={folder / 'poet'}"], **options)
    with pytest.raises(RequestError, match=r"known are: .*, poet"):
        named.generate("one", GREEDY, adapter="parrot")


@pytest.mark.parametrize(("is_enabled", "names"), [(True, set(builtin_adapters())), (False, set())])
def test_the_built_in_model_may_come_without_its_adapters(is_enabled, names):
    config = locate_model(EngineConfig(lora=LoraConfig(enable_builtin_adapters=is_enabled), quiet=True))

    assert {one.name for one in first_adapters(config)} == names


def test_a_name_of_ones_own_goes_before_a_built_in_adapter():
    builtin = tuple(LoraPath(name=name, path=f"/ours/{name}", is_builtin=True) for name in ("pirate", "poet"))
    config = EngineConfig(lora=LoraConfig(lora_paths=("poet=/mine/poet",)), builtin_adapters=builtin)

    assert first_adapters(config) == [builtin[0], LoraPath(name="poet", path="/mine/poet")]


def test_built_in_adapters_are_served_beside_an_adapter_root_and_cannot_be_named_by_their_folder(tmp_path):
    options = {"quiet": True, "device": "cpu", "load_format": "dummy", "kv_blocks": 16, "max_running_requests": 2}
    llm = LLM(adapter_root=str(tmp_path), max_lora_rank=8, max_loras_per_batch=1, **options)

    assert len(llm.generate([[1, 2]], SamplingParams(max_new_tokens=1, ignore_eos=True), adapter="pirate")) == 1
    with pytest.raises(AdapterError, match="outside the adapter root"):
        llm.load_adapter("mine", builtin_adapters()["pirate"])


def test_the_process_that_reads_adapters_ends_with_its_engine(folder, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", mark := uuid4().hex)
    options = {"model_path": str(folder), "device": "cpu", "kv_blocks": 16, "max_running_requests": 2}
    config = with_first(engine_config(options, quiet=True), [])
    closed, forgotten = build_device(config), build_device(config)
    assert until(lambda: len(marked(mark)) == 2)

    closed.close()
    assert len(marked(mark)) == 1
    del forgotten
    gc.collect()
    assert until(lambda: not marked(mark))


# An LLM object takes addresses for paths, and looks for names below a resolver's prefix.

SHORT = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
OPTIONS = {"quiet": True, "device": "cpu", "kv_blocks": 16, "max_running_requests": 2}


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory) -> Path:
    with_adapters = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(with_adapters, "smollm2")
    for seed, name in enumerate(("poet", "team/legal", "odd")):
        make_adapter(with_adapters / "adapters" / name, model, seed=seed)
    change_config(with_adapters / "adapters" / "odd", peft_type="LOHA")
    return write_byte_tokenizer(with_adapters)


@pytest.fixture(scope="module")
def hub(with_adapters) -> Iterator[HubServer]:
    with hub_server() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        for name in ("poet", "odd"):
            hub.put(
                f"acme/{name}", {path.name: path.read_bytes() for path in (with_adapters / "adapters" / name).iterdir()}
            )
        yield hub


@pytest.fixture(scope="module")
def near(with_adapters) -> LLM:
    """With a folder as its resolver's prefix."""
    adapters = {"poet": with_adapters / "adapters" / "poet"}
    return LLM(with_adapters, adapters=adapters, lora_resolver=str(with_adapters / "adapters"), **OPTIONS)


def said(llm: LLM, adapter: str | None) -> tuple[int, ...]:
    (answer,) = llm.generate("one", SHORT, adapter=adapter)
    return tuple(answer.token_ids)


def test_adapters_of_the_hub_are_served_at_the_start_and_later(with_adapters, hub, near, tmp_path):
    far = LLM(with_adapters, adapters={"first": "hf://acme/poet"}, adapter_cache_dir=str(tmp_path), **OPTIONS)
    far.load_adapter("later", "acme/poet")
    assert said(far, "first") == said(far, "later") == said(near, "poet") != said(near, None)
    names = [name for name, _ in hub.downloads()]
    # Outlines of what it needs and of whether it can be served, then one download for both.
    assert names == ["adapter_config.json", "adapter_model.safetensors"] * 3


@pytest.mark.usefixtures("hub")
def test_what_is_wrong_with_a_source_is_told_and_the_name_stays_free(with_adapters, near, tmp_path):
    far = LLM(with_adapters, adapter_cache_dir=str(tmp_path), **OPTIONS)
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
def test_a_prefix_may_be_an_address(with_adapters, near, tmp_path):
    far = LLM(with_adapters, lora_resolver="hf://acme", adapter_cache_dir=str(tmp_path), **OPTIONS)
    assert said(far, "poet") == said(near, "poet")
    with pytest.raises(RequestError, match="There is no model or adapter named 'none'"):
        said(far, "none")
