from __future__ import annotations

import re
import runpy

import pytest
import shellingham

from rota import __version__
from rota.cli import main
from rota.commands.serve import COMMON_OPTIONS, SERVE_CONFIGS
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig, ServerConfig
from rota.core.errors import ModelError
from rota.core.options import options_of
from rota.core.policy_config import PolicyConfig


def run(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    """What `rota serve` would serve."""
    asked: list[tuple[EngineConfig, ServerConfig]] = []
    with pytest.raises(SystemExit) as end:
        main(["serve", *arguments], serve=lambda *configs: asked.append(configs))
    assert end.value.code == 0
    return asked[0]


def fail(*arguments: str) -> int | str | None:
    """The exit code of a command that must not serve."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments), serve=lambda *_: pytest.fail("it served"))
    return end.value.code


def test_without_flags_the_defaults_are_those_of_the_dataclasses():
    assert run() == (EngineConfig(), ServerConfig())


def test_the_package_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["rota", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("rota", run_name="__main__")

    assert end.value.code == 0
    assert capsys.readouterr().out == f"rota {__version__}\n"


def test_every_config_field_is_a_flag(capsys):
    assert fail("serve", "--help-all") == 0
    shown = capsys.readouterr().out
    for name in options_of(*SERVE_CONFIGS):
        assert f"--{name.replace('_', '-')}" in shown


def test_help_shows_twenty_flags_in_groups_and_where_the_others_are(capsys):
    assert fail("serve", "--help") == 0
    shown = capsys.readouterr().out
    flags = {flag for flag in re.findall(r"^  (?:-h, )?(--[a-z-]+)", shown, re.M)}
    common = {f"--{name.replace('_', '-')}" for names in COMMON_OPTIONS.values() for name in names}
    assert (len(common), flags) == (20, common | {"--config", "--quiet", "--help-all", "--help"})
    assert [title for title in COMMON_OPTIONS if f"\n{title}:\n" not in shown] == []


def test_flags_of_every_kind_reach_their_config():
    engine, server = run(
        "folder", "--dtype", "float32", "--mem-fraction-static", "0.5", "--no-enable-prefix-caching",
        "--overlap-depth", "1", "--port", "0", "--disable-tqdm", "--max-loras-per-batch", "4",
        "--lora-paths", "a=adapters/a", "b=adapters/b", "--lora-policy", "drain",
    )  # fmt: skip

    assert engine == EngineConfig(
        model=ModelConfig(model_path="folder", dtype="float32"),
        cache=CacheConfig(mem_fraction_static=0.5),
        scheduler=SchedulerConfig(enable_prefix_caching=False, overlap_depth=1),
        lora=LoraConfig(lora_paths=("a=adapters/a", "b=adapters/b"), max_loras_per_batch=4),
        policy=PolicyConfig(lora_policy="drain"),
        quiet=True,
    )
    assert server == ServerConfig(port=0)


@pytest.mark.parametrize("arguments", [["folder"], ["--model-path", "folder"], ["folder", "--model-path", "folder"]])
def test_the_model_is_an_argument_or_a_flag(arguments):
    assert run(*arguments)[0].model.model_path == "folder"


@pytest.mark.parametrize(
    "arguments",
    [
        ["folder", "--lora-paths", "a=/x", "/y"],
        ["--lora-paths", "a=/x", "/y", "--model-path", "folder"],
        ["--lora-paths=a=/x", "/y", "--port", "0", "folder"],
        ["--lora-paths", "a=/x", "--lora-paths", "/y", "--", "folder"],
    ],
)
def test_a_path_after_an_adapter_is_an_adapter_where_the_model_is_named_elsewhere(arguments):
    engine, _ = run(*arguments)

    assert engine.model.model_path == "folder"
    assert engine.lora.lora_paths == ("a=/x", "/y")


def test_a_path_after_an_adapter_is_an_adapter_where_a_file_names_the_model(tmp_path):
    file = tmp_path / "rota.toml"
    file.write_text('model-path = "folder"\n')

    assert run("--config", str(file), "--lora-paths", "/x", "/y")[0].lora.lora_paths == ("/x", "/y")


@pytest.mark.parametrize("first", ["a=/x", "/x", '{"lora_name": "a", "lora_path": "/x"}'])
def test_what_may_be_an_adapter_or_the_model_is_refused(capsys, first):
    assert fail("serve", "--lora-paths", first, "/models/llama") == 2
    error = capsys.readouterr().err
    assert "/models/llama, after --lora-paths, may be an adapter or the model" in error
    assert "--model-path" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lora-paths", "a=/x", "b=/y"],
        ["--lora-paths", "a=/x", '{"lora_name": "b", "lora_path": "/y"}'],
        ["--lora-paths", "/x", "--lora-paths", "/y"],
        ["--lora-paths", "/x"],
    ],
)
def test_adapters_that_can_be_nothing_else_go_to_the_built_in_model(arguments):
    engine, _ = run(*arguments)

    assert engine.model.model_path is None
    assert engine.lora.lora_paths == tuple(one for one in arguments if one != "--lora-paths")


def test_a_word_may_stand_in_for_a_number():
    assert run("--max-loras-per-batch", "auto")[0].lora.max_loras_per_batch == "auto"


def test_a_config_file_takes_the_same_names_and_flags_go_before_it(tmp_path):
    file = tmp_path / "rota.toml"
    file.write_text('model-path = "folder"\nport = 1234\nkv_block_size = 32\n')
    engine, server = run("--config", str(file), "--kv-block-size", "16")

    assert engine.model.model_path == "folder"
    assert engine.cache.kv_block_size == 16
    assert server.port == 1234


def test_a_config_file_may_ask_for_quiet(tmp_path):
    file = tmp_path / "rota.toml"
    file.write_text("quiet = true\n")

    assert run("--config", str(file))[0].quiet
    assert not run()[0].quiet


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot = 1", "prot is not an option; did you mean port?"),
        ('port = "high"', "port must be a whole number, not 'high'."),
        ("[server]\nport = 1", "server is not an option"),
        ("port 1", "is not a TOML file"),
        ("quiet = 1", "quiet must be true or false, not 1."),
    ],
)
def test_a_config_file_that_is_wrong_is_refused_by_name(tmp_path, capsys, content, words):
    file = tmp_path / "rota.toml"
    file.write_text(content)

    assert fail("serve", "--config", str(file)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(file) in error


def test_a_config_file_that_is_not_there_is_named(capsys):
    assert fail("serve", "--config", "/nowhere.toml") == 2
    assert "/nowhere.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prot", "1"], "No such option: --prot"),
        (["--port", "high"], "--port"),
        (["--device", "tpu"], "'tpu' is not one of"),
        (["--kv-block-size", "7"], "kv_block_size must be a power of two of at least 8"),
        (["--max-loras-per-batch", "many"], "'many' is not int|auto"),
        (["one", "--model-path", "two"], "named twice"),
        (["--lora-policy", "hope"], "lora_policy: 'hope' is not a policy; the policies are rotate, drain, wait."),
    ],
)
def test_a_flag_that_is_wrong_ends_with_code_2(capsys, arguments, words):
    assert fail("serve", *arguments) == 2
    assert words in capsys.readouterr().err


def test_an_error_of_ours_is_one_sentence_without_a_traceback(capsys):
    def serve(_engine: EngineConfig, _server: ServerConfig) -> None:
        raise ModelError("There is no model in /nowhere.")

    with pytest.raises(SystemExit) as end:
        main(["serve"], serve=serve)

    assert end.value.code == 2
    assert capsys.readouterr().err == "rota: There is no model in /nowhere.\n"


@pytest.mark.parametrize(
    "words", [[], ["serve"], ["bench"], ["simulate"], ["chat"], ["demo"], ["adapters"], ["adapters", "list"]]
)
def test_a_short_h_asks_every_command_for_help(capsys, words):
    assert fail(*words, "-h") == 0
    assert re.search(r"^  -h, --help ", capsys.readouterr().out, re.M)


def completed(monkeypatch, capsys, words: str) -> set[str]:
    """What a shell offers for the last of these words."""
    monkeypatch.setattr("sys.argv", ["rota"])
    monkeypatch.setenv("_ROTA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert fail() == 0
    return set(capsys.readouterr().out.split())


def test_a_shell_completes_commands_and_flags(monkeypatch, capsys):
    assert completed(monkeypatch, capsys, "rota s") == {"serve", "simulate"}
    assert completed(monkeypatch, capsys, "rota serve --lora-p") == {"--lora-paths", "--lora-policy"}
    assert "list" in completed(monkeypatch, capsys, "rota adapters l")


@pytest.mark.parametrize("flag", ["--install-completion", "--show-completion"])
def test_where_no_shell_is_found_its_completion_is_one_sentence(monkeypatch, capsys, flag):
    def find_none() -> tuple[str, str]:
        raise shellingham.ShellDetectionFailure

    monkeypatch.setattr(shellingham, "detect_shell", find_none)
    assert fail(flag) == 1
    told = capsys.readouterr()
    assert re.fullmatch(r"Shell .*not supported\.\n", told.out + told.err)


def test_the_version_is_printed(capsys):
    assert fail("--version") == 0
    assert capsys.readouterr().out == f"rota {__version__}\n"
