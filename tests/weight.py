"""Weighs the package: how many files, how long, who imports whom. `make check` prints it: `python -m tests.weight`."""

from __future__ import annotations

import ast
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rota.extensions import FACES

PACKAGE = Path(__file__).parent.parent / "src" / "rota"

# Where each extension lies: the folder of its face, or one file.
FOLDERS = {name: face.replace("rota.", "", 1).replace(".", "/") for name, face in FACES.items()} | {
    name: FACES[name].rpartition(".")[0].removeprefix("rota.").replace(".", "/")
    for name in FACES
    if name not in ("sim", "workload")
}
# They put a server together, and name what belongs to it.
COMMANDS = ("cli.py", "__main__.py", "commands/")
# What puts a server, or an engine in a program, together.
COMPOSITION = (*COMMANDS, "llm/")

Function = ast.FunctionDef | ast.AsyncFunctionDef
# They name what there is of a kind: commands, families, layouts, policies, routes, formats, sources and backends.
TABLES = (
    "cli.py",
    "commands/adapters/app.py",
    "engine/build.py",
    "engine/families/table.py",
    "engine/weights/layouts/table.py",
    "server/app.py",
    "sources/sources.py",
    "text/tools/formats.py",
)
# Parts of an engine that the table of backends imports, and that are no backends.
NO_BACKENDS = ("engine/choices.py", "engine/engine.py")


@cache
def parsed() -> dict[str, tuple[str, ast.Module]]:
    """Every file that has code, by its path in the package; a file with a docstring alone has none."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: (text, ast.parse(text)) for path, text in texts.items()}
    return {path: (text, tree) for path, (text, tree) in trees.items() if tree.body[bool(ast.get_docstring(tree)) :]}


def lines_of_files() -> dict[str, int]:
    return {path: len(text.splitlines()) for path, (text, _) in parsed().items()}


def lines_of_functions() -> dict[str, int]:
    """With their signature and docstring; a function inside another counts in both."""
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, (_, tree) in parsed().items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }


def p90(lines: dict[str, int]) -> int:
    """By the nearest rank: the shortest length that nine in ten do not exceed."""
    return sorted(lines.values())[math.ceil(0.9 * len(lines)) - 1]


def names_used_twice() -> dict[str, list[str]]:
    """Classes of one name, with their files. A leading underscore makes no difference."""
    found = defaultdict(list)
    for path, (_, tree) in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def importers() -> dict[str, set[str]]:
    """The modules that import a module, by its path."""
    found: dict[str, set[str]] = {path: set() for path in parsed() if not path.endswith("__init__.py")}
    for path, (_, tree) in parsed().items():
        for name in imported_modules(tree):
            one = name.removeprefix("rota.").replace(".", "/") + ".py"
            if one in found and one != path:
                found[one].add(path)
    return found


def imported_once() -> list[str]:
    return [path for path, by in importers().items() if len(by) == 1]


def with_one_importer() -> list[str]:
    """Modules that one other imports, and no table names. Packages that hand a name on are no importers."""
    found = {path: {one for one in by if not one.endswith("__init__.py")} for path, by in importers().items()}
    named = {path: by & set(TABLES) for path, by in found.items() if path not in NO_BACKENDS}
    return [path for path, by in found.items() if len(by) == 1 and not named.get(path)]


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loose(folder: str) -> int:
    """Files with code in a folder, without those in folders below."""
    return sum(path.rpartition("/")[0] == folder for path in parsed())


def below(folder: str) -> int:
    return sum(path.startswith(f"{folder}/") for path in parsed())


def extension_of(path: str) -> str | None:
    own = f"{path.removesuffix('.py')}/"
    return next((name for name, folder in FOLDERS.items() if own.startswith(f"{folder}/")), None)


def lines_of_kernel() -> int:
    """What is no extension, and puts nothing together."""
    files = lines_of_files()
    return sum(files[path] for path in files if not extension_of(path) and not path.startswith(COMPOSITION))


def report() -> dict[str, float]:
    files, functions, modules = lines_of_files(), lines_of_functions(), importers()
    return {
        "files with code": len(files),
        "lines": sum(files.values()),
        "lines of the kernel": lines_of_kernel(),
        "median lines of a file": statistics.median(files.values()),
        "longest file": max(files.values()),
        "nine functions in ten have at most": p90(functions),
        "longest function": max(functions.values()),
        "share of modules with one importer": round(len(with_one_importer()) / len(modules), 3),
        "… with those that a table names": round(len(imported_once()) / len(modules), 3),
        "class names used twice": len(names_used_twice()),
        "files in scheduler": below("scheduler"),
        "files in engine/lora": below("engine/lora"),
        "loose files in server": loose("server"),
    }


if __name__ == "__main__":
    for name, count in report().items():
        print(f"{name:36} {count:>8,}")
