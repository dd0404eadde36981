"""What a start waits for: the engine is started before the server loads what only answers need."""

from __future__ import annotations

import subprocess
import sys

from rota.runtime.lifeline import tied
from tests.tiny_tokenizer import write_byte_tokenizer

HEAVY = (
    "torch",
    "numpy",
    "tokenizers",
    "jinja2",
    "fastapi",
    "uvicorn",
    "rota.sim",
    "rota.bench.run",
    "rota.server.app",
)
LOOK = f"print([name for name in {HEAVY} if name in sys.modules])"

SERVE = f"""
import sys
import rota.commands.engines
from rota.cli import main

def look(*_):
    {LOOK}
    raise SystemExit

rota.commands.engines.engine_service = look
main(["serve", sys.argv[1], "--port", "0", "--device", "cpu"])
"""


def printed(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    ran = subprocess.run(tied(command), stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout.strip()


def test_the_engine_is_started_before_anything_that_only_answers_need_is_imported(tmp_path):
    (write_byte_tokenizer(tmp_path) / "config.json").write_text("{}")
    assert printed(SERVE, str(tmp_path)) == "[]"


def test_a_bench_without_a_plot_does_without_matplotlib():
    program = "import sys, rota.bench.run, rota.commands.bench; print('matplotlib' in sys.modules)"
    assert printed(program) == "False"


def test_the_engines_process_imports_no_command_line_with_the_main_module():
    program = "import sys, rota.__main__; print([name for name in ('rota.cli', 'typer') if name in sys.modules])"
    assert printed(program) == "[]"
