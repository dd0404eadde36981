"""Environments of their own for clients of other projects, with the newest versions.

Each folder of `programs` is a family: clients that can be installed side by side.
`python -m tests.clients.environment` says which versions the environments have.
"""

from __future__ import annotations

import json
import venv
from collections.abc import Iterator
from pathlib import Path

from tests.processes import Command, run_program

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = PROGRAMS.parent.parent.parent / ".venv-clients"
INSTALL_S = 3000.0


class CannotInstallError(Exception):
    """The package index cannot be reached, or does not have a package."""


def interpreter(family: Path) -> Path:
    """What runs the programs of a family, beside its clients' newest versions. Raises CannotInstallError."""
    if (family / "package.json").is_file():
        # The clients want a newer Node than many machines have, so that it is one of the packages.
        packages = [f"{name}@{version}" for name, version in wanted_of_node(family).items()]
        flags = ("--no-save", "--no-package-lock", "--no-audit", "--no-fund")
        must_run(["npm", "install", "--prefix", family, *flags, *packages])
        return family / "node_modules/.bin/node"
    home = ENVIRONMENTS / family.name
    python = home / "bin/python"
    if not home.is_dir():
        venv.create(home, with_pip=True)
    # pip itself would look for versions that go together for many minutes.
    must_run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "uv"])
    uv = (home / "bin/uv", "pip", "install", "--quiet", "--upgrade", "--python", python)
    must_run([*uv, "--requirement", family / "requirements.txt"])
    return python


def must_run(command: Command) -> None:
    try:
        done = run_program(command, check=False, timeout=INSTALL_S)
    except FileNotFoundError as error:
        raise CannotInstallError(str(error)) from error
    if done.returncode:
        raise CannotInstallError(done.stderr.strip()[-2000:])


def wanted_of_node(family: Path) -> dict[str, str]:
    wanted: dict[str, str] = json.loads((family / "package.json").read_text())["dependencies"]
    return wanted


def versions() -> Iterator[str]:
    for family in sorted(PROGRAMS.iterdir()):
        if (family / "package.json").is_file():
            for name in wanted_of_node(family):
                package = json.loads((family / "node_modules" / name / "package.json").read_text())
                yield f"{family.name}: {name} {package['version']}"
        elif (family / "requirements.txt").is_file():
            wanted = [line.split("[")[0] for line in (family / "requirements.txt").read_text().splitlines()]
            python = ENVIRONMENTS / family.name / "bin/python"
            listed = json.loads(run_program([python, "-m", "pip", "list", "--format", "json"]).stdout)
            have = {package["name"].replace("_", "-"): package["version"] for package in listed}
            yield from (f"{family.name}: {name} {have[name.replace('_', '-')]}" for name in wanted)


if __name__ == "__main__":
    print(*versions(), sep="\n")
