"""Nothing that a rank does draws on its own: a request's seed is drawn once, where the request is made."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "src" / "rota"
# Sources of chance: modules, and functions of torch and NumPy that draw from a state of their process.
MODULES = {"random", "secrets", "uuid"}
DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "urandom", "seed", "default_rng"}
DRAWS |= {"exponential_", "uniform_", "normal_", "random_", "bernoulli_"}


def draws_in(text: str) -> list[str]:
    """What draws without a generator that it was given."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            found += sorted(names & MODULES)
        elif isinstance(node, ast.Call) and not any(keyword.arg == "generator" for keyword in node.keywords):
            found += sorted({ast.unparse(node.func).rpartition(".")[2]} & DRAWS)
    return found


@pytest.mark.parametrize("room", ["core", "policy", "scheduler", "engine"])
def test_what_ranks_compute_with_has_no_chance_of_its_own(room):
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    assert {str(path): found for path in files if (found := draws_in(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize("text", ["import secrets", "from random import choice", "torch.rand(3)", "os.urandom(8)"])
def test_a_draw_is_found(text):
    assert draws_in(text)
    assert not draws_in("torch.rand(3, generator=dice)")
