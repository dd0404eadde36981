"""Runs benchmark clients of other projects against a live server, each from a throw-away environment of its own.

python benchmarks/clients/run.py --base-url http://127.0.0.1:30000 --tokenizer MODEL_FOLDER [--only NAME …]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path

from rota.runtime.lifeline import tied

HERE = Path(__file__).parent
INSTALL_S, RUN_S = 3000, 900


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its package without its dependencies, what its client part needs beside ours, how it is run."""

    package: str
    needs: tuple[str, ...]
    command: tuple[str, ...]
    sign: str  # that it came to its end


RANDOM = ("--num-prompts", "12", "--random-input-len", "64", "--random-output-len", "32", "--request-rate", "8")
SGLANG_NEEDS = ("orjson", "pybase64", "IPython", "datasets", "setproctitle", "partial_json_parser")
VLLM_NEEDS = (
    "pybase64", "cbor2", "openai_harmony", "cachetools", "cloudpickle", "py-cpuinfo", "xgrammar", "apache-tvm-ffi",
    "partial_json_parser", "llguidance", "einops",
)  # fmt: skip
GUIDELLM_NEEDS = (
    "loguru", "pydantic_settings", "more_itertools", "culsans", "ftfy", "websockets", "datasets", "Faker", "h2",
)  # fmt: skip
LM_EVAL_NEEDS = ("dill", "sacrebleu", "datasets", "tenacity", "pytablewriter")


def sglang(backend: str, *more: str) -> Client:
    flags = ("--backend", backend, "--base-url", "URL", "--model", "MODEL", "--tokenizer", "TOKENIZER")
    command = ("python", str(HERE / "sglang_client.py"), *flags, "--dataset-name", "random-ids", *RANDOM, *more)
    return Client("sglang", SGLANG_NEEDS, (*command, "--disable-tqdm"), "Successful requests:                     12")


CLIENTS = {
    "sglang": sglang("sglang", "--lora-name", "ADAPTER"),
    "sglang-as-vllm": sglang("vllm"),
    "sglang-as-vllm-adapter": sglang("vllm", "--lora-name", "ADAPTER"),
    "vllm": Client(
        "vllm",
        VLLM_NEEDS,
        ("python", str(HERE / "vllm_client.py"), "--backend", "openai", "--base-url", "URL", "--model", "MODEL",
         "--tokenizer", "TOKENIZER", "--dataset-name", "random", *RANDOM, "--ignore-eos", "--lora-modules", "ADAPTER",
         "--disable-tqdm"),
        "Successful requests:                     12",
    ),
    "guidellm": Client(
        "guidellm",
        GUIDELLM_NEEDS,
        ("guidellm", "run", "--backend", "kind=openai_http,target=URL,model=ADAPTER", "--profile",
         "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12", "--tokenizer",
         "kind=huggingface_auto,model=TOKENIZER", "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
         "--disable-console-interactive"),
        "Benchmarking complete",
    ),
    "lm_eval": Client(
        "lm_eval",
        LM_EVAL_NEEDS,
        ("lm_eval", "run", "--model", "local-completions", "--model_args",
         "model=MODEL,base_url=URL/v1/completions,tokenizer=TOKENIZER,num_concurrent=2,max_retries=1",
         "--tasks", "tiny_generate", "--include_path", str(HERE)),
        "|tiny_generate|",
    ),
}  # fmt: skip


def prepare(client: Client, folder: Path) -> Path:
    """An environment that also sees ours, so that torch is not installed once more; the newest versions of the rest."""
    home = folder / client.package
    if not home.exists():
        venv.create(home, with_pip=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
        (Path(packages) / "zz_rota.pth").write_text(sysconfig.get_path("purelib"))
    pip = [str(home / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run(tied([*pip, "--no-deps", client.package]), check=True, timeout=INSTALL_S)
    # pip warns of all the dependencies that are left out on purpose.
    subprocess.run(tied([*pip, *client.needs]), check=True, timeout=INSTALL_S, stderr=subprocess.DEVNULL)
    return home


def run(client: Client, home: Path, words: dict[str, str], folder: Path) -> tuple[bool, str]:
    program, *arguments = client.command
    for word, meaning in words.items():
        arguments = [argument.replace(word, meaning) for argument in arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # Clients leave reports behind, and lm_eval looks for the task's questions where it is started.
    (folder / "tiny_generate.jsonl").write_text((HERE / "tiny_generate.jsonl").read_text())
    done = subprocess.run(
        tied([home / "bin" / program, *arguments]),
        cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    return done.returncode == 0 and client.sign in shown, shown


def words_of(base_url: str, tokenizer: Path) -> dict[str, str]:
    """What stands for the server in a command: its base model and its first adapter."""
    with urllib.request.urlopen(f"{base_url}/v1/models") as response:
        models = json.load(response)["data"]
    adapters = [model["id"] for model in models if model.get("parent")]
    if not adapters:
        sys.exit(f"{base_url} serves no adapter; the clients are to ask for one.")
    base = next(model["id"] for model in models if not model.get("parent"))
    return {"URL": base_url, "TOKENIZER": str(tokenizer), "ADAPTER": adapters[0], "MODEL": base}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="where the server is")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="the model's folder, for clients that count tokens"
    )
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=[*CLIENTS], help="run only these")
    parser.add_argument("--environments", type=Path, help="keep the environments in this folder and use them again")
    options = parser.parse_args()
    words = words_of(options.base_url, options.tokenizer.resolve())
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            home = prepare(CLIENTS[name], (options.environments or Path(scratch)).resolve())
            is_fine, shown = run(CLIENTS[name], home, words, Path(scratch))
            print(f"{name}: {'works' if is_fine else 'FAILED'}", flush=True)
            if not is_fine:
                failed.append(name)
                print(shown[-2000:])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
