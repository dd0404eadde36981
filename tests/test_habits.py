"""What CONTRIBUTING.md promises is so: one command for hooks and CI, one version, files that exist, no idle sleep."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
import yaml

from rota import __version__
from tests.processes import run_program
from tests.test_sizes import comment_lines

ROOT = Path(__file__).parent.parent


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def recipe_of(target: str) -> list[str]:
    """The commands that make would run for a target, if its environment is set up."""
    # A make that runs these tests would hand its own flags on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = run_program(["make", "--dry-run", "--always-make", target], cwd=ROOT, env=environment)
    return [line.strip() for line in done.stdout.splitlines()]


def hooks() -> dict[str, dict[str, object]]:
    (local,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    assert local["repo"] == "local"
    return {stage: hook for hook in local["hooks"] for stage in hook["stages"]}


def test_ci_and_the_hook_before_a_push_run_the_same_command():
    assert hooks()["pre-push"]["entry"] == text_of(".ci/run").splitlines()[-1] == "make test"


def test_the_hook_before_a_commit_runs_what_make_test_runs_before_the_tests():
    assert hooks()["pre-commit"]["entry"] == "make check"

    checks = [line for line in recipe_of("check") if re.search(r"/(ruff|mypy|lint-imports)\b", line)]
    assert [Path(line.split()[0]).name for line in checks] == ["ruff", "ruff", "mypy", "lint-imports"]
    all_of_test = recipe_of("test")
    assert [line for line in all_of_test if line in checks] == checks
    assert "-m pytest" in all_of_test[-1]


def test_a_hook_looks_at_everything_with_the_tools_of_this_repository():
    for hook in hooks().values():
        assert (hook["language"], hook["pass_filenames"], hook["always_run"]) == ("system", False, True)


def test_the_changelog_begins_with_the_version_that_is_here():
    versions = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d{2}-\d{2}$", text_of("CHANGELOG.md"), re.MULTILINE)

    assert versions[0] == __version__
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split("."))], reverse=True)


def test_contributing_names_files_that_are_there():
    names = re.findall(r"`(?:python )?((?:src|tests|docs|benchmarks)/[\w./-]*)`", text_of("CONTRIBUTING.md"))

    assert len(names) > 30
    assert [name for name in names if not (ROOT / name).exists() and "NAME" not in name] == []


def sleeps(text: str) -> list[int]:
    """The lines that sleep for longer than nothing, without a comment there or right above that says why."""
    if "sleep(" not in text:
        return []  # as in nearly every file, which need not be parsed
    commented = comment_lines(text)
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep"
        if ast.unparse(node.args[0]) != "0" and not {node.lineno, node.lineno - 1} & commented
    ]


def test_a_test_sleeps_only_where_a_comment_says_that_time_is_what_it_tests():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert {str(path): found for path in files if (found := sleeps(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("time.sleep(0.3)", [1]),
        ("sleep(pause)", [1]),
        ("await asyncio.sleep(0)", []),
        ("time.sleep(0.3)  # time is what is tested", []),
        ("# Time is what is tested.\ntime.sleep(0.3)", []),
    ],
)
def test_a_sleep_without_a_reason_is_found(line, found):
    assert sleeps(line) == found
