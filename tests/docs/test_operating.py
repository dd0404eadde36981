"""The page for operators names metrics, flags, log lines and exit codes that there are."""

from __future__ import annotations

import re

import pytest
import yaml

from docs.generate.commands import all_commands
from docs.generate.pages import DOCS
from rota.core.config import ServerConfig
from rota.core.errors import ConfigError, EngineLostError
from rota.observe.metric_table import METRICS
from rota.runtime.timeouts import EngineTimeouts
from tests.docs.fences import blocks

PAGE = (DOCS / "operating.md").read_text("utf-8")
SOURCES = "".join(path.read_text("utf-8") for path in sorted((DOCS.parent / "src/rota").rglob("*.py")))


def test_every_metric_of_the_page_exists():
    named = set(re.findall(r"`((?:rota|process)_[a-z_]+)`", PAGE))

    assert len(named) > 12
    assert named <= {metric.name for metric in METRICS}


def test_every_flag_of_the_page_is_one_of_serve():
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    flags = {flag for one in all_commands()["serve"].params for flag in one.opts}

    assert len(named) > 8
    assert named <= flags


def test_every_log_line_of_the_page_is_written_somewhere():
    lines = re.findall(r"^\| (?:warning|error) \| `([^`]+)` \|", PAGE, re.M)

    assert len(lines) == 13
    assert [line for line in lines if f'"{line}"' not in SOURCES] == []


def test_the_exit_codes_are_those_of_the_errors():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \| ", PAGE, re.M)}

    assert codes == {0, 1, ConfigError.exit_code, EngineLostError.exit_code}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (r"`--engine-silence-s` \((\d+)\)", ServerConfig().engine_silence_s),
        (r"`--drain-timeout` seconds \((\d+)\)", ServerConfig().drain_timeout),
        (r"must end within (\d+) minutes", EngineTimeouts().start_s / 60),
    ],
)
def test_the_page_says_the_defaults(words, value):
    (said,) = re.findall(words, " ".join(PAGE.split()))

    assert float(said) == value


def test_the_probes_wait_as_long_as_the_server_may_take():
    (block,) = blocks(PAGE, "yaml")
    probes = yaml.safe_load(block)
    startup = probes["startupProbe"]

    assert startup["periodSeconds"] * startup["failureThreshold"] >= EngineTimeouts().start_s
    assert probes["terminationGracePeriodSeconds"] > ServerConfig().drain_timeout
    assert probes["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert {probes[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness")} == {"/readyz"}
