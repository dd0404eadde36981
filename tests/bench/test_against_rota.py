"""The bench against the real application, with a device that only counts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rota.cli import main
from rota.core.config import EngineConfig
from rota.core.lora_paths import LoraPath
from rota.runtime.client import EngineClient
from rota.runtime.in_process import InProcessService
from rota.runtime.registry import Registry
from rota.text.tokenizer import Tokenizer
from tests.engine.terminal import Terminal
from tests.fakes import FakeDevice, alphabet
from tests.server.applications import made_app, running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

STORM = """
slots = 2
transients = 3
transient_every_s = 0.2
[[clients]]
requests = 40
rate_per_s = 40.0
prompt_tokens = [1, 30]
output_tokens = [1, 30]
adapters = 3
base_share = 0.2
cancel_share = 0.5
cancel_within_s = 0.3
"""

SGLANG_FLAGS = """
backend base-url host port model dataset-name dataset-path num-prompts request-rate max-concurrency random-input-len
random-output-len random-range-ratio lora-name lora-request-distribution lora-zipf-alpha disable-ignore-eos disable-tqdm
seed warmup-requests output-file
"""

SHORT = ("--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "5")
KINDS = ("TTFT", "E2E", "TPOT", "ITL", "worst pause of an answer", "longest that its reader stands")


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    registry = Registry("letters", "/models/letters")
    adapters = [registry.add(LoraPath(name=name, path=f"/adapters/{name}")) for name in ("pirate", "poet", "clerk")]
    device = FakeDevice(step_s=0.002, next_token=alphabet)
    service = EngineClient(InProcessService(lambda: device, EngineConfig()), adapters)
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("model")))
    with running(made_app(service, tokenizer, registry)) as url:
        service.wait_until_ready(TIMEOUT_S)
        yield url


def bench(url: str, *arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "--base-url", url, "--vocab-size", "256", *arguments])
    return end.value.code


def test_random_prompts_over_several_adapters_are_all_answered(url, tmp_path, capsys):
    file = tmp_path / "numbers.json"
    code = bench(
        url, "--dataset-name", "random-ids", "--num-prompts", "30", "--max-concurrency", "6",
        "--random-input-len", "20", "--random-output-len", "12", "--random-range-ratio", "1.0",
        "--lora-name", "pirate", "poet", "clerk",
        "--base-share", "0.3", "--json", str(file),
    )  # fmt: skip

    assert code == 0
    found = json.loads(file.read_text())
    assert (found["requests"], found["failed"], found["problems"]) == (30, 0, {})
    assert (found["input_tokens"], found["output_tokens"]) == (600, 360)
    assert set(found["adapters"]) == {"base", "pirate", "poet", "clerk"}
    shown = capsys.readouterr().out
    for words in ("30 answered, 0 failed", "requests/s", "fairness", "P95"):
        assert words in shown
    for name in ("all requests", *found["adapters"]):
        assert sum(f" {name} " in line for line in shown.splitlines()) == len(("counts", *KINDS)), name
    for kind in KINDS:
        assert kind in shown


def test_several_adapters_may_follow_an_equals_sign(url, tmp_path):
    file = tmp_path / "numbers.json"
    assert bench(url, *SHORT, "--lora-name=pirate", "poet", "--json", str(file)) == 0

    assert set(json.loads(file.read_text())["adapters"]) == {"pirate", "poet"}


def test_a_config_file_takes_the_same_names_and_flags_go_before_it(url, tmp_path):
    file, found = tmp_path / "rota.toml", tmp_path / "numbers.json"
    file.write_text('num-prompts = 3\nrandom_output_len = 4\nrandom-input-len = 9\nlora-name = ["poet", "clerk"]\n')
    assert bench(url, "--config", str(file), "--num-prompts", "5", "--json", str(found)) == 0

    asked = json.loads(found.read_text())["asked"]
    assert (asked["num_prompts"], asked["random_output_len"], asked["lora_name"]) == (5, 4, ["poet", "clerk"])


def test_a_terminal_sees_how_far_a_run_has_come_unless_told_otherwise(url, tmp_path, monkeypatch):
    file = tmp_path / "rota.toml"
    file.write_text("quiet = true\n")
    terminal, still = Terminal(), Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert bench(url, *SHORT) == 0
    monkeypatch.setattr("sys.stderr", still)
    assert bench(url, *SHORT, "--disable-tqdm") == bench(url, *SHORT, "--config", str(file)) == 0

    assert "Asking:   0%" in terminal.getvalue()
    assert "/4" in terminal.getvalue()
    assert still.getvalue() == ""


def test_text_prompts_are_answered(url, tmp_path):
    file = tmp_path / "numbers.json"
    code = bench(url, "--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "4", "--json", str(file))

    assert code == 0
    assert json.loads(file.read_text())["failed"] == 0


def test_a_storm_of_leavers_and_guests_loses_nobody(url, tmp_path):
    scenario, file = tmp_path / "storm.toml", tmp_path / "numbers.json"
    scenario.write_text(STORM)

    assert bench(url, "--scenario", str(scenario), "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert (found["requests"], found["failed"], found["problems"]) == (43, 0, {})
    assert found["left"] > 0


def test_a_run_can_be_drawn_and_appended_to_a_file(url, tmp_path):
    lines, picture, page = tmp_path / "runs.jsonl", tmp_path / "run.png", tmp_path / "run.html"
    for file in (picture, page):
        assert bench(url, *SHORT, "--output-file", str(lines), "--plot", str(file)) == 0

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in page.read_text()
    first, second = map(json.loads, lines.read_text().splitlines())
    assert first["asked"]["num_prompts"] == second["asked"]["num_prompts"] == 4
    assert "api_key" not in first["asked"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "/nowhere.toml"], "There is no scenario file /nowhere.toml"),
        (["--json", "/nowhere/at/all.json"], "There is no folder /nowhere/at"),
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--model", "nobody"], "does not answer a first short request: status 404"),
        (["--config", "/nowhere.toml"], "Cannot read /nowhere.toml"),
        (["--plot", "picture.xyz"], "plot must end in .png, .svg, .pdf, .html, not 'picture.xyz'"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_code_2(url, capsys, arguments, words):
    assert bench(url, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_single_answer_ends_with_code_1(url, capsys):
    short = ("--num-prompts", "2", "--random-output-len", "1", "--random-range-ratio", "1.0")
    assert bench(url, *short, "--random-input-len", "5000") == 1
    assert "2 failed" in capsys.readouterr().out


def test_the_flags_of_sglangs_bench_are_known(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    for flag in SGLANG_FLAGS.split():
        assert f"--{flag}" in shown
