from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from rota.cli import main
from rota.commands.engines import adapter_memory, promise
from rota.core.config import EngineConfig, ServerConfig
from rota.core.policy_config import PolicyConfig
from tests.builders import capacity


def served(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    """What `rota serve` would serve."""
    seen: list[tuple[EngineConfig, ServerConfig]] = []
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments], serve=lambda config, server: seen.append((config, server)))
    assert ended.value.code == 0
    return seen[0]


def test_a_model_after_a_key_is_a_model_and_no_second_key():
    config, server = served("--api-key", "one", "/models/tiny", "--api-key", "two")

    assert server.api_key == ("one", "two")
    assert config.model.model_path == "/models/tiny"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "Others can reach 0.0.0.0, and there are no keys"),
        (["--api-key-file", "/nowhere/keys.toml"], "Cannot read the key file /nowhere/keys.toml"),
        (["--api-key", "two words"], "api_key must be a text"),
        (["--drain-timeout", "-1"], "drain_timeout must be a finite number of seconds"),
        (["--ssl-certfile", "/nowhere/tls.crt"], "Cannot read /nowhere/tls.crt of --ssl-certfile"),
        (["--max-connections", "100000000"], "max_connections is 100000000, but this process may open"),
        (["--request-timeout", "0"], "request_timeout must be a finite number above 0"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "/nowhere", *arguments])

    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "/nowhere"], ["demo", "--no-browser"]], ids=["serve", "demo"])
def test_a_port_that_is_taken_is_said_before_the_model_is_read(capsys, monkeypatch, command):
    monkeypatch.setattr("rota.commands.serve.locate_model", lambda _: pytest.fail("the model was read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main([*command, "--port", str(port)])

    assert ended.value.code == 2
    assert f"Cannot listen on 127.0.0.1, port {port} " in capsys.readouterr().err


WHY = "(slots: 6 adapters at the start; rank: the largest at the start)."


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ((3, 251_658_240), f"3 slots for adapters up to rank 16 take 252 MB on the device {WHY}"),
        ((1, 83_886_080), f"One slot for adapters up to rank 16 takes 84 MB on the device {WHY}"),
        ((0, 0), ""),
    ],
)
def test_a_server_says_what_its_slots_cost_and_why(found, sentence):
    slots, adapter_bytes = found
    assert adapter_memory(capacity(slots=slots, adapter_bytes=adapter_bytes)) == sentence


def test_a_server_says_where_adapters_lie_below_the_model_s_matrices():
    said = adapter_memory(replace(capacity(), fused_lora_a=("qkv", "o")))
    assert said.endswith(f"{WHY} Their A lie below the model's matrices at qkv, o.")


def test_a_server_without_an_engine_says_nothing_of_slots():
    assert adapter_memory(None) == ""


@pytest.mark.parametrize(
    ("asked_ms", "turn_ms", "step_s", "told"),
    [
        (50.0, None, 0.03, "a step takes 30.0 ms here and a turn 180.0 ms,"),
        (50.0, None, 0.03, "1,200 ms can be promised"),
        (1200.0, None, 0.03, ""),
        (1200.0, 1000.0, 0.03, "a turn 1,000.0 ms, and a change of adapters comes on top. 5,300 ms can be promised"),
        (5300.0, 1000.0, 0.03, ""),
        (400.0, 20.0, 0.03, ""),
        (50.0, None, 0.0, ""),
        (50.0, 1000.0, 0.0, ""),
        (None, None, 0.03, ""),
        (None, 1000.0, 0.03, ""),
    ],
)
def test_a_pause_that_is_promised_and_cannot_be_kept_is_answered_with_one_that_can(asked_ms, turn_ms, step_s, told):
    policy = PolicyConfig(lora_max_stall_ms=asked_ms, lora_rotation_quantum_ms=turn_ms)
    said = promise(policy, replace(capacity(), decode_s=step_s))
    assert told in said
    assert bool(told) == bool(said)
