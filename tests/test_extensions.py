"""The kernel stands alone: it imports no extension, and serves without any one of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import pytest

from rota.extensions import FACES
from tests.processes import run_program
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.weight import COMMANDS, FOLDERS, extension_of, imported_modules, parsed


def edges() -> Iterator[tuple[str, str]]:
    for path, (_, tree) in parsed().items():
        for name in imported_modules(tree):
            one = name.removeprefix("rota.").replace(".", "/")
            yield from ((path, found) for found in (f"{one}.py", f"{one}/__init__.py") if found in parsed())


def trespasses(found: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    """Imports of an extension from outside, but for those of its face by another extension."""
    faces = {face.removeprefix("rota.").replace(".", "/") + ".py" for face in FACES.values()}
    return [
        (path, imported)
        for path, imported in found
        if (inside := extension_of(imported)) and extension_of(path) != inside
        if not (extension_of(path) and (imported in faces or inside == "workload"))
        if not path.startswith(COMMANDS) or extension_of(path)
    ]


def test_the_kernel_imports_no_extension_and_no_extension_another_ones_inside():
    assert trespasses(edges()) == []


@pytest.mark.parametrize(
    "edge",
    [
        ("runtime/process.py", "runtime/ranks/lead.py"),
        ("server/app.py", "server/ollama/writer.py"),
        ("sim/run.py", "runtime/replicas/router.py"),
        ("commands/chat/talk.py", "bench/client.py"),
    ],
)
def test_a_trespass_is_found(edge):
    assert trespasses(iter([edge])) == [edge]


# Starts a server whose engine is fake, in a Python that cannot import one folder after the other. Each is tried in a
# copy of the process, because imports cannot be undone.
PROGRAM = """
import json, os, sys, threading, urllib.request
from functools import partial
from pathlib import Path
from importlib.abc import MetaPathFinder

model, folders = sys.argv[1], sys.argv[2:]
hidden = ""

class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if hidden and (name + ".").startswith(hidden + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
import rota.commands.serve
from rota.core.config import EngineConfig, ModelConfig, ServerConfig
from tests.fakes import spelling_device
# Once for all copies, also what a server would import when it serves. None of it is an extension, or it could not be
# hidden any more.
import fastapi.openapi.utils, pydantic.dataclasses, tokenizers, transformers.utils.chat_template_utils
import uvicorn.lifespan.on, uvicorn.loops.auto, uvicorn.protocols.http.httptools_impl
import rota.commands.engines, rota.server.access.key_file, rota.server.app, rota.server.door.acceptor
import rota.server.listen
loaded = [name for name in sys.modules for folder in folders if (name + ".").startswith(folder + ".")]
assert not loaded, loaded

def ask(url):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        told = json.load(answer)["usage"]["completion_tokens"]
    print(hidden or "nothing", told, flush=True)
    os.kill(os.getpid(), 15)

for folder in ["", *folders]:
    child = os.fork()
    if not child:
        hidden = folder
        config = EngineConfig(model=ModelConfig(model_path=model), quiet=True)
        on_ready = lambda url: threading.Thread(target=ask, args=(url,)).start()
        rota.commands.serve.serve_model(config, ServerConfig(port=0), on_ready, spelling_device)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.long("a server starts for each of sixteen folders; imports of extensions are checked without")
def test_without_any_one_extension_the_server_answers_a_chat(tmp_path):
    (write_byte_tokenizer(tmp_path) / "config.json").write_text("{}")
    hidden = [f"rota.{folder.replace('/', '.')}" for folder in FOLDERS.values()]

    told = run_program([sys.executable, "-c", PROGRAM, str(tmp_path), *hidden]).stdout
    answers = [line for line in told.splitlines() if line.endswith(" 3")]
    assert answers == [f"{name} 3" for name in ("nothing", *hidden)]


# The folders of tests that mirror the kernel's. The simulator is the world of many tests of the scheduler, so it is
# hidden in a run of its own.
KERNEL = ("core", "policy", "scheduler", "runtime", "sources", "text", "grammar", "observe", "engine", "server")
SIMULATOR = ("sim", "workload")


@pytest.mark.long("the kernel's tests, once more for each of two sets of extensions")
@pytest.mark.parametrize(
    ("hidden", "least"), [([name for name in FACES if name not in SIMULATOR], 4000), (SIMULATOR, 3000)]
)
def test_the_kernels_own_tests_pass_without_extensions(hidden, least):
    folders = [f"tests/{room}" for room in KERNEL]
    options = ["-rfE", "-p", "tests.without_extensions", "-n", "2", "--dist", "loadfile"]
    command, environment = [sys.executable, "-m", "pytest", *options, *folders], {"ROTA_WITHOUT": ",".join(hidden)}
    told = run_program(command, env=os.environ | environment, check=False).stdout
    last = told.splitlines()[-1]
    assert not re.search("failed|error", last), told[-5000:]
    assert int(re.search(r"(\d+) passed", last)[1]) >= least
