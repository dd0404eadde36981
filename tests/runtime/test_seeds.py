"""A request's seed is drawn once, where the request is made: nothing that an engine does draws on its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rota.core.request import MAX_SEED, SamplingParams
from rota.runtime.seeds import seeded


def test_a_seed_that_was_given_is_kept_and_further_choices_follow_from_it():
    asked = SamplingParams(seed=7)

    assert seeded(asked) == asked
    assert [seeded(asked, choice).seed for choice in range(3)] == [7, 8, 9]
    assert seeded(SamplingParams(seed=MAX_SEED), 1).seed == 0


def test_without_a_seed_each_choice_of_each_request_is_given_one_of_its_own():
    drawn = [seeded(SamplingParams(top_p=0.5), choice) for choice in (0, 1, 0, 1)]

    assert len({params.seed for params in drawn}) == 4
    assert {params.top_p for params in drawn} == {0.5}


def test_a_greedy_request_needs_no_seed():
    assert seeded(SamplingParams(temperature=0.0)).seed is None


PACKAGE = Path(__file__).parents[2] / "src" / "rota"
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
