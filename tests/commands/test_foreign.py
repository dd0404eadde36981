"""`rota serve` understands the flags of vLLM and SGLang, or says what to type in their place."""

from __future__ import annotations

import json

import pytest

from docs.generate.commands import all_commands
from rota.commands.foreign import FOREIGN_FLAGS, ForeignFlag, translated
from rota.commands.serve import SERVE_CONFIGS
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig, ServerConfig
from rota.core.options import options_of
from rota.core.policy_config import PolicyConfig
from tests.commands.peers import SGLANG, VLLM
from tests.test_cli import fail, run

# argparse takes the beginning of a flag for the flag; SGLang's users type these.
SHORTENED = {"--tp": "--tp-size", "--dp": "--dp-size"}
# vLLM had it before 0.11, and scripts have it still.
FORMER = {"--disable-log-requests"}


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return {name for one in all_commands()["serve"].params for name in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("flag", FOREIGN_FLAGS, ids=lambda flag: flag.names[0])
def test_a_row_has_flags_of_theirs_and_one_of_ours(flag: ForeignFlag, ours):
    for names, known in ((flag.vllm, VLLM["flags"]), (flag.sglang, SGLANG["flags"])):
        theirs = {SHORTENED.get(name, name) for name in names.split()} - FORMER
        assert {name if name in known else name.replace("--no-", "--") for name in theirs} <= known
    assert not flag.ours or flag.ours.split()[0] in ours


def test_a_name_stands_in_one_row_of_a_server():
    for server in ("vllm", "sglang"):
        names = [name for flag in FOREIGN_FLAGS for name in getattr(flag, server).split()]
        assert sorted(names) == sorted(set(names))


def test_a_flag_that_has_the_name_of_ours_is_never_refused():
    ours = {f"--{name.replace('_', '-')}" for name in options_of(*SERVE_CONFIGS)}

    assert [flag.names for flag in FOREIGN_FLAGS if not flag.ours and ours & {*flag.names}] == []


def test_the_help_says_what_a_flag_is_called_elsewhere(capsys):
    assert fail("serve", "--help-all") == 0
    shown = "".join(capsys.readouterr().out.split())  # a name may be broken at a hyphen

    for name in ("--max-model-len", "--gpu-memory-utilization", "--max-cpu-loras", "--lora-modules", "--tp-size"):
        assert name in shown


# ── what was typed ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_command_of_vllm_serves_what_it_says(capsys):
    engine, server = run(
        "/models/llama", "--max-model-len", "8k", "--gpu-memory-utilization", "0.92", "--enable-lora",
        "--lora-modules", "a=/x", '{"name": "b", "path": "/y", "base_model_name": "llama"}',
        "--max-loras", "4", "--max-cpu-loras=32", "--max_lora_rank", "32", "-tp", "2", "--dtype", "half",
        "--kv-cache-dtype", "fp8_e4m3", "--quantization", "awq_marlin", "--max-num-seqs", "64",
        "--max-num-batched-tokens", "4096", "--enforce-eager", "--trust-remote-code", "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes", "--api-key", "k1", "--served-model-name", "llama",
        "--disable-log-requests", "--allowed-origins", '["https://a.example"]', "--port", "8000",
    )  # fmt: skip

    assert engine == EngineConfig(
        model=ModelConfig(
            model_path="/models/llama", context_length=8000, tensor_parallel_size=2, dtype="float16",
            enable_cuda_graphs=False,
        ),
        cache=CacheConfig(mem_fraction_static=0.88, kv_cache_dtype="fp8"),
        scheduler=SchedulerConfig(max_running_requests=64, chunked_prefill_size=4096),
        lora=LoraConfig(
            lora_paths=("a=/x", '{"lora_name": "b", "lora_path": "/y"}'), max_loras_per_batch=4, max_loaded_loras=32,
            max_lora_rank=32,
        ),
    )  # fmt: skip
    assert server == ServerConfig(
        api_key=("k1",), served_model_name="llama", log_level="warning", tool_call_parser="hermes", port=8000,
        allowed_origins=("https://a.example",),
    )  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert said[:5] == [
        "--max-model-len 8k is --context-length 8000 here.",
        "--gpu-memory-utilization 0.92 is --mem-fraction-static 0.88 here.",
        "--enable-lora needs nothing here: adapters are always served.",
        "--lora-modules is --lora-paths here.",
        "--max-loras is --max-loras-per-batch here.",
    ]
    assert [line for line in said if line.startswith("--port")] == []


def test_a_command_of_sglang_serves_what_it_says(capsys):
    engine, server = run(
        "--model", "/models/llama", "--lora-paths", "a=/x", '{"lora_name": "b", "lora_path": "/y", "pinned": true}',
        "--max-loras-per-batch", "4", "--lora-backend", "csgmv", "--mem-fraction-static", "0.8", "--tp", "2",
        "--dp-size", "3", "--schedule-policy", "lpm", "--disable-radix-cache", "--disable-overlap-schedule",
        "--enable-metrics", "--page-size", "64", "--lora-drain-wait-threshold", "1.5", "--watchdog-timeout", "60",
        "--cuda-graph-bs-decode", "1", "2", "4", "--attention-backend", "fa3", "--dtype", "bfloat16",
    )  # fmt: skip

    assert engine == EngineConfig(
        model=ModelConfig(
            model_path="/models/llama", tensor_parallel_size=2, data_parallel_size=3, dtype="bfloat16",
        ),
        cache=CacheConfig(mem_fraction_static=0.8, kv_block_size=64),
        scheduler=SchedulerConfig(enable_prefix_caching=False, overlap_depth=1),
        lora=LoraConfig(
            lora_paths=("a=/x", '{"lora_name": "b", "lora_path": "/y", "pinned": true}'), max_loras_per_batch=4,
        ),
        policy=PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=1.5),
    )  # fmt: skip
    assert server == ServerConfig(engine_silence_s=60.0)
    said = capsys.readouterr().out
    assert "--tp is --tensor-parallel-size here.\n" in said
    assert "--disable-overlap-schedule is --overlap-depth 1 here.\n" in said
    assert "--mem-fraction-static" not in said


def test_every_row_has_a_command_of_its_own_that_is_understood_or_a_sentence(capsys):
    for flag in FOREIGN_FLAGS:
        for name in flag.names:
            if flag.ours or flag.is_needless:
                _, sentences = translated(["serve", "folder", name])
                assert flag.ours.split() == [name] or sentences[0].startswith(name)
            else:
                assert fail("serve", name) == 2
                assert f"Rota has no {name}: {flag.sentence}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "here"),
    [
        (["--max-model-len", "auto"], []),
        (["--max-model-len", "-1", "--port", "1"], ["--port", "1"]),
        (["--max-model-len=4K", "folder"], ["--context-length", "4096", "folder"]),
        (["--seed", "0", "folder"], ["folder"]),
        (["--seed=0", "folder"], ["folder"]),
        (["--lora-modules", '[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y"}]'],
         ["--lora-paths", '{"lora_name": "a", "lora_path": "/x"}', '{"lora_name": "b", "lora_path": "/y"}']),
        (["--allowed-origins", "https://a.example"], ["--allowed-origins", "https://a.example"]),
        (["--enable_prefix_caching"], ["--enable-prefix-caching"]),
        (["--api-key", "my_key=x"], ["--api-key", "my_key=x"]),
        (["--", "--max-model-len"], ["--", "--max-model-len"]),
    ],
)  # fmt: skip
def test_values_are_read_as_they_are_meant_there(typed, here):
    assert translated(["serve", *typed])[0] == ["serve", *here]


def test_our_own_flags_are_left_as_they_are():
    typed = ["serve", "--lora-paths", json.dumps({"lora_name": "a_b", "lora_path": "/x_y"}), "--port", "-1", "/m_n"]

    assert translated(typed) == (typed, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["folder", "--served-model-name", "a", "b"], "give --served-model-name a alone"),
        (["--model", "folder", "--served-model-name", "a", "b"], "give --served-model-name a alone"),
        (["--served-model-name", "a", "b", "folder"], "give --served-model-name a alone"),
        (["one", "--model", "two"], "The model is named twice: one and two"),
        (["--gpu-memory-utilization", "most"], "--gpu-memory-utilization must be a number between 0 and 1, not 'most'"),
        (["--lora-modules", '{"name": "a"}'], "is no JSON with name and path"),
        (["--speculative-config", "{}"], "Rota has no --speculative-config: there is no speculative decoding"),
        (["--kv-cache-dtype", "fp8_e5m2"], "'fp8_e5m2' is not one of 'auto', 'fp8'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(capsys, arguments, words):
    assert fail("serve", *arguments) == 2
    assert words in capsys.readouterr().err


def test_one_name_of_the_model_may_stand_before_the_model():
    engine, server = run("--served-model-name", "a", "folder")

    assert (engine.model.model_path, server.served_model_name) == ("folder", "a")


def test_the_model_may_be_named_by_flag_and_by_position_if_both_say_the_same():
    assert run("folder", "--model", "folder")[0].model.model_path == "folder"
