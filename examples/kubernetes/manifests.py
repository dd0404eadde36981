"""The manifests are made from one file of values: `python -m examples.kubernetes.manifests [VALUES FOLDER]`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from string import Template

from rota.core.version import __version__

HERE = Path(__file__).parent
VALUES = HERE / "values.toml"
# What a pod has beside the pause and the drain, before it is killed.
_SPARE_S = 30


def manifests(values: Path = VALUES) -> dict[str, str]:
    """Every manifest by the name of its file. A value that is missing raises KeyError."""
    given = tomllib.loads(values.read_text("utf-8"))
    given |= {"version": __version__, "grace_s": given["pause_s"] + given["drain_s"] + _SPARE_S}
    templates = sorted((HERE / "templates").glob("*.yaml"))
    return {path.name: Template(path.read_text("utf-8")).substitute(given) for path in templates}


def write(values: Path = VALUES, folder: Path = HERE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in manifests(values).items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
