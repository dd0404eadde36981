from __future__ import annotations

import pytest
import typer

from rota.cli import main
from rota.commands.demo import demo_command
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig, ServerConfig
from rota.core.options import options_of
from rota.core.policy_config import PolicyConfig
from rota.llm.config import ENGINE_CONFIGS


def shown(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    """What `rota demo` would serve."""
    served: list[tuple[EngineConfig, ServerConfig]] = []
    app = typer.Typer(add_completion=False)
    app.command()(demo_command(serve=lambda config, server, _: served.append((config, server))))
    app(list(arguments), standalone_mode=False)
    return served[0]


@pytest.mark.parametrize(("arguments", "is_quiet"), [([], False), (["--quiet"], True), (["--disable-tqdm"], True)])
def test_a_demo_can_be_told_to_be_quiet(arguments, is_quiet):
    assert shown(*arguments)[0].quiet is is_quiet


def test_without_flags_it_serves_the_built_in_model_on_three_slots_and_this_machine_alone():
    config, server = shown()

    assert config == EngineConfig(lora=LoraConfig(max_loras_per_batch=3))
    assert (server.host, server.port) == ("127.0.0.1", 30000)


def test_it_takes_every_flag_of_the_engine_that_serve_takes(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    help_text = capsys.readouterr().out
    for name in options_of(*ENGINE_CONFIGS):
        assert f"--{name.replace('_', '-')}" in help_text


def test_flags_of_every_kind_reach_the_engine():
    config, _ = shown(
        "folder", "--dtype", "float32", "--kv-blocks", "64", "--max-running-requests", "4", "--lora-policy", "drain",
        "--lora-paths", "a=/x", "--max-lora-rank", "8",
    )  # fmt: skip

    assert config == EngineConfig(
        model=ModelConfig(model_path="folder", dtype="float32"),
        cache=CacheConfig(kv_blocks=64),
        scheduler=SchedulerConfig(max_running_requests=4),
        lora=LoraConfig(lora_paths=("a=/x",), max_loras_per_batch=3, max_lora_rank=8),
        policy=PolicyConfig(lora_policy="drain"),
    )


def test_a_config_file_takes_the_same_names_and_flags_go_before_it(tmp_path):
    file = tmp_path / "demo.toml"
    file.write_text('dtype = "float32"\nslots = 2\nport = 0\nkv-blocks = 32\n')
    config, server = shown("--config", str(file), "--kv-blocks", "64")

    assert (config.model.dtype, config.cache.kv_blocks, config.lora.max_loras_per_batch) == ("float32", 64, 2)
    assert server.port == 0


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        (["--slots", "2"], 2),
        (["--max-loras-per-batch", "2"], 2),
        (["--max-loras-per-batch", "auto"], "auto"),
        (["--slots", "2", "--max-loras-per-batch", "2"], 2),
    ],
)
def test_slots_have_two_names(arguments, slots):
    assert shown(*arguments)[0].lora.max_loras_per_batch == slots


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slots", "2", "--max-loras-per-batch", "3"], "they are the same thing; give one of them"),
        (["one", "--model-path", "two"], "named twice"),
        (["--lora-paths", "a=/x", "/models/llama"], "may be an adapter or the model"),
        (["--kv-block-size", "7"], "kv_block_size must be a power of two"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])

    assert ended.value.code == 2
    assert words in capsys.readouterr().err
