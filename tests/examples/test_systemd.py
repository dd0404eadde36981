"""The unit for systemd is one that systemd takes, and starts a server with flags and exit codes that there are."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from docs.generate.commands import all_commands
from rota.commands.flags import spread_lists
from rota.core.config import ServerConfig
from rota.core.errors import ConfigError, EngineLostError
from rota.core.options import options_of
from rota.llm.config import ENGINE_CONFIGS
from rota.runtime.timeouts import EngineTimeouts
from tests.processes import run_program

UNIT = Path(__file__).parents[2] / "examples/systemd/rota.service"
SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600}


def settings() -> dict[str, str]:
    """Every setting by its name; each is there once."""
    lines = re.sub(r"\\\n\s*", " ", UNIT.read_text("utf-8")).splitlines()
    pairs = [line.split("=", 1) for line in lines if line and not line.startswith(("#", "["))]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(map(tuple, pairs))


def seconds(span: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w*)", span).groups()
    return int(number) * SECONDS[unit]


def words() -> list[str]:
    return shlex.split(settings()["ExecStart"])


def test_it_starts_rota_with_flags_that_exist():
    program, command, *given = words()

    assert Path(program).name == "rota"
    spread = spread_lists(given, options_of(*ENGINE_CONFIGS).values())
    all_commands()[command].make_context(command, spread)  # raises if it cannot be


def test_it_starts_again_what_may_recover_and_not_what_cannot_work():
    unit = settings()

    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"].split() == [str(ConfigError.exit_code)]
    assert str(EngineLostError.exit_code) not in unit["RestartPreventExitStatus"].split()


def test_it_waits_for_starts_and_open_answers_as_long_as_the_server_does():
    unit, given = settings(), words()

    assert seconds(unit["TimeoutStartSec"]) > EngineTimeouts().start_s
    assert seconds(unit["TimeoutStopSec"]) > float(given[given.index("--drain-timeout") + 1])
    assert float(given[given.index("--drain-timeout") + 1]) == ServerConfig().drain_timeout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed on this machine")
def test_systemd_takes_it(tmp_path):
    """It looks for the program, so it gets one that is there."""
    unit = tmp_path / "rota.service"
    unit.write_text(UNIT.read_text("utf-8").replace(words()[0], sys.executable))
    done = run_program(["systemd-analyze", "verify", "--man=no", unit], check=False)

    assert (done.returncode, [line for line in done.stderr.splitlines() if "rota.service" in line]) == (0, [])
