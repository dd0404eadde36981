"""`rota doctor` says before a start what the start would say, and what a server would have."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from rota.cli import main
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig
from rota.engine.build import build_engine, forecast
from rota.llm.config import first_adapters, with_first
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A model's folder and an adapter's, of rank 8."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(folder / "model", "llama3")
    return folder / "model", make_adapter(folder / "adapter", model, r=8)


def examined(capsys, *arguments: str | Path) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit code, and what was found of each thing."""
    with pytest.raises(SystemExit) as end:
        main(["doctor", *map(str, arguments), "--json"])
    found: dict[str, list[tuple[str, str]]] = {}
    for one in json.loads(capsys.readouterr().out):
        found.setdefault(one["about"], []).append((one["level"], one["sentence"]))
    assert isinstance(end.value.code, int)
    return end.value.code, found


@on_cpu
def test_a_machine_that_can_serve_has_no_errors(capsys, made):
    model, adapter = made
    code, found = examined(capsys, model, "--lora-paths", f"legal={adapter}", "--port", "0")

    assert code == 0
    assert {level for sentences in found.values() for level, _ in sentences} == {"ok"}
    assert "the CPU" in found["machine"][0][1]
    assert "(LlamaForCausalLM) is served" in found["model"][0][1]
    assert "slots for adapters up to rank 8" in found["adapters"][0][1]
    assert found["adapters"][1][1] == "1 of 1 adapters can be served from the start."


def test_findings_are_lines_and_flags_of_vllm_are_understood(capsys, made):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--model", str(made[0]), "--max-model-len", "64", "--port", "0"])

    assert end.value.code == 0
    said = capsys.readouterr()
    assert "up to 64 tokens a request" in said.out
    assert all(line.split()[0] in ("ok", "warning", "error") for line in said.out.splitlines())
    assert "--max-model-len is --context-length here." in said.err


def test_it_finds_several_errors_at_once_in_the_words_of_a_start(capsys, made):
    model, adapter = made
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, found = examined(
            capsys, model, "--port", str(taken.getsockname()[1]), "--allowed-origins", "*", "--max-lora-rank", "4",
            "--lora-paths", f"legal={adapter}", "gone=/nowhere",
        )  # fmt: skip

    assert code == 1
    errors = {about: [text for level, text in told if level == "error"] for about, told in found.items()}
    assert "Cannot listen on 127.0.0.1" in errors["port"][0]
    assert "--allowed-origins * lets the pages of every site in" in errors["clients"][0]
    too_large, gone = errors["adapters"]
    assert "'legal'" in too_large
    assert "--max-lora-rank 8" in too_large
    assert "'gone': There is no adapter folder at /nowhere" in gone


@pytest.mark.parametrize(
    ("arguments", "about", "words"),
    [
        (["--kv-block-size", "7"], "flags", "kv_block_size must be a power of two"),
        (["--config", "/nowhere.toml"], "flags", "Cannot read /nowhere.toml"),
        (["/nowhere"], "model", "/nowhere"),
        (["{model}", "--kv-blocks", "2000000000"], "model", "blocks would fit"),
        (["{model}", "--context-length", "99999"], "model", "the model was made for"),
    ],
)
def test_what_a_start_refuses_is_an_error(capsys, made, arguments, about, words):
    code, found = examined(capsys, *(word.format(model=made[0]) for word in arguments), "--port", "0")

    assert code == 1
    level, sentence = found[about][-1]
    assert level == "error"
    assert words in sentence


@on_cpu
def test_a_gpu_that_is_asked_for_and_not_there_is_an_error_and_the_model_is_not_looked_at(capsys, made):
    code, found = examined(capsys, made[0], "--device", "cuda", "--port", "0")

    assert code == 1
    assert found["machine"][-1][0] == "error"
    assert "model" not in found


def test_a_model_that_a_hub_must_give_is_a_warning_and_is_not_downloaded(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    code, found = examined(capsys, "nobody/has-this-model", "--port", "0")

    assert code == 0
    assert found["model"] == [
        (
            "warning",
            "nobody/has-this-model is not on this machine: a start looks for it on a hub, and downloads it.",
        )
    ]


def test_more_adapters_in_host_memory_than_it_holds_are_a_warning(capsys, made):
    code, found = examined(capsys, made[0], "--max-loaded-loras", "2000000000", "--port", "0")

    assert code == 0
    assert "max_loaded_loras is 2000000000" in next(text for level, text in found["adapters"] if level == "warning")


@on_cpu
def test_an_engine_has_what_was_foretold(made):
    model, adapter = made
    config = EngineConfig(
        model=ModelConfig(model_path=str(model), device="cpu"),
        cache=CacheConfig(mem_fraction_static=0.01),
        lora=LoraConfig(lora_paths=(f"legal={adapter}",)),
        quiet=True,
    )
    config = with_first(config, first_adapters(config))
    foretold = forecast(config).capacity
    engine = build_engine(config)
    found = engine.capacity
    engine.close()

    same = (
        "blocks",
        "slots",
        "slot_rank",
        "pages",
        "slots_from",
        "rank_from",
        "max_sequence_tokens",
        "dtype",
        "device",
    )
    assert [getattr(foretold, name) for name in same] == [getattr(found, name) for name in same]
    assert foretold.adapter_bytes == pytest.approx(found.adapter_bytes, rel=0.05)
