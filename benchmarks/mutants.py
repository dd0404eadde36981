"""Counts how many small faults in the rooms that decide are noticed by their tests.

    python benchmarks/mutants.py [--count 100] [--seed 1] [--skip 0] [--jobs 2] [--root CHECKOUT] --output FILE

A mutant is the package with one change: a comparison, a sign, a constant, a condition or a statement. The places are
drawn by the seed from all that `policy` and `scheduler` have, so two versions are compared by shares, not mutant by
mutant. Each mutant is tried in a copy of the checkout. It is noticed if a test of `tests/policy` or `tests/scheduler`
fails or does not end. The tests of files that import the changed file begin, and of these the shortest: most mutants
are noticed within seconds. FILE has every mutant that no test noticed, as the line before and after.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from xml.etree import ElementTree

from rota.runtime.lifeline import tied

ROOMS = ("policy", "scheduler")
TESTS = ("tests/policy", "tests/scheduler")
# A mutant may make a test endless. Other work may share the cores.
LONGEST_TEST_S, LIMIT_S = 60, 1800.0

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*"}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: what stands in a file between two places, and what is to stand there."""

    path: str
    begin: int
    end: int
    text: str
    kind: str


Change = tuple[ast.expr | ast.stmt, str, str]  # what goes, what comes, the kind
TextOf = Callable[[ast.expr | ast.stmt], str]


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Every change that can be made to a file."""
    text, starts = source.encode(), [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text_of(node: ast.expr | ast.stmt) -> str:
        begin, end = span(node)
        return text[begin:end].decode()

    for node in ast.walk(ast.parse(source)):
        for changed, instead, kind in (*_of_conditions(node, text_of), *_of_values(node, text_of)):
            yield Mutant(path, *span(changed), instead, kind)


def _of_conditions(node: ast.AST, text_of: TextOf) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield node, f"({text_of(left)} {COMPARISONS[type(op)]} {text_of(right)})", "comparison"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, f"({word.join(f'({text_of(one)})' for one in values)})", "and, or"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({text_of(operand)})", "not"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({text_of(test)}))", "condition"


def _of_values(node: ast.AST, text_of: TextOf) -> Iterator[Change]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS and not _is_of_types(node):
            yield node, f"({text_of(left)} {SIGNS[type(op)]} {text_of(right)})", "sign"
        case ast.Constant(value=bool() as value):
            yield node, str(not value), "constant"
        case ast.Constant(value=int() | float() as value):
            yield node, repr(value + 1), "constant"
        case ast.Call(func=ast.Name(id=name) as function) if name in SWAPPED:
            yield function, SWAPPED[name], "min, max, any, all"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield node, "pass", "statement"


def _is_of_types(node: ast.BinOp) -> bool:
    """Whether a sum is of texts or lists, as far as that can be seen: such a mutant would only raise a TypeError."""
    kinds = ast.List | ast.JoinedStr | ast.Tuple
    texts = [side for side in (node.left, node.right) if isinstance(side, ast.Constant) and isinstance(side.value, str)]
    return bool(texts) or isinstance(node.left, kinds) or isinstance(node.right, kinds)


def drawn(root: Path, count: int, seed: int) -> list[Mutant]:
    """The same for the same sources and seed."""
    every = [
        mutant
        for room in ROOMS
        for path in sorted((root / "src/rota" / room).rglob("*.py"))
        for mutant in mutants_of(str(path.relative_to(root)), path.read_text("utf-8"))
    ]
    print(f"{len(every)} mutants can be made; {count} are drawn by seed {seed}.", flush=True)
    return random.Random(seed).sample(every, count)


def copied(root: Path, into: Path) -> Path:
    """A checkout without what tools have left in it."""
    return Path(shutil.copytree(root, into, ignore=shutil.ignore_patterns(".*", "__pycache__")))


# A plug-in of pytest: which tests begin, by how long each took without a mutant.
ORDER = """
import json, os

def pytest_collection_modifyitems(items):
    module = os.environ["CHANGED_MODULE"]
    with open(os.environ["SECONDS_OF_TESTS"]) as file:
        seconds = json.load(file)
    names = {path: path.read_text("utf-8") for path in {item.path for item in items}}
    items.sort(key=lambda item: (f"{module} import" not in names[item.path], seconds.get(item.name, 0.0)))
"""


def noticed_by(folder: Path, changed: str = "", seconds_of: Path | None = None) -> str | None:
    """The first test that fails, or what else happened; None if all pass."""
    paths = [str(folder / "src"), str(folder), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    # A plug-in that some machines have takes the argument `benchmark` for its own.
    options = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-o", f"timeout={LONGEST_TEST_S}"]
    if seconds_of is None:
        options.append(f"--junitxml={folder / 'seconds.xml'}")
    else:
        (folder / "rota_order.py").write_text(ORDER, "utf-8")
        found["SECONDS_OF_TESTS"] = str(seconds_of)
        found["CHANGED_MODULE"] = changed.removeprefix("src/").removesuffix(".py").replace("/", ".")
        options += ["-p", "rota_order"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-rfE", *options, *TESTS]
    try:
        ended = subprocess.run(tied(command), cwd=folder, env=found, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "did not end"
    if not ended.returncode:
        return None
    named = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return named[0][:200] if named else ended.stdout[-200:]


def seconds_of_tests(folder: Path) -> Path:
    """How long each test took in the run before."""
    cases = ElementTree.parse(folder / "seconds.xml").iter("testcase")
    told = folder / "seconds.json"
    told.write_text(json.dumps({case.attrib["name"]: float(case.attrib["time"]) for case in cases}), "utf-8")
    return told


def tried(mutant: Mutant, folder: Path, seconds_of: Path) -> dict[str, Any]:
    path = folder / mutant.path
    source = path.read_bytes()
    changed = source[: mutant.begin] + mutant.text.encode() + source[mutant.end :]
    path.write_bytes(changed)
    begun_at = time.monotonic()
    try:
        noticed = noticed_by(folder, mutant.path, seconds_of)
    finally:
        path.write_bytes(source)
    line = source[: mutant.begin].count(b"\n")
    last = line + mutant.text.count("\n") + 1
    return {
        "file": f"{mutant.path}:{line + 1}",
        "kind": mutant.kind,
        "before": source.decode().splitlines()[line].strip(),
        "after": " ".join(one.strip() for one in changed.decode().splitlines()[line:last]),
        "noticed": noticed,
        "seconds": round(time.monotonic() - begun_at, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="the first so many of them were tried before")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    mutants = drawn(asked.root, asked.count, asked.seed)[asked.skip :]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.jobs):
            folders.put(copied(asked.root, Path(scratch) / str(number)))
        if reason := noticed_by(folder := folders.get()):
            sys.exit(f"The tests fail without a mutant: {reason}")
        seconds_of = seconds_of_tests(folder)
        folders.put(folder)

        def try_one(mutant: Mutant) -> dict[str, Any]:
            folder = folders.get()
            try:
                return tried(mutant, folder, seconds_of)
            finally:
                folders.put(folder)

        rows = []
        for row in pool.map(try_one, mutants):
            rows.append(row)
            print(f"{len(rows)}: {row['file']} {row['kind']}: {row['noticed'] or 'NOT NOTICED'}", flush=True)
    missed = [row for row in rows if not row["noticed"]]
    told = {"mutants": len(rows), "noticed": len(rows) - len(missed), "seed": asked.seed, "missed": missed}
    asked.output.write_text(json.dumps(told | {"every": rows}, indent=1) + "\n", "utf-8")
    print(f"{len(rows) - len(missed)} of {len(rows)} mutants were noticed.")


if __name__ == "__main__":
    main()
