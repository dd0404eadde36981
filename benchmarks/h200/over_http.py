"""A server in processes of its own, `rota serve`, asked over HTTP by `rota bench`'s client."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rota.runtime.lifeline import tied
from rota.workload.scenario import Scenario

from .server import Asked, Outcome, peak_rss_gb

ANNOUNCEMENT = re.compile(r"^Rota serves .* at (http\S+)$", re.MULTILINE)
START_S = 300.0
LOOK_EVERY_S = 0.02
STOP_S = 6.0


class HttpServer:
    """Its log, its options and every scenario it is given are kept in a folder, as files that `rota` reads."""

    via = "http"

    def __init__(self, asked: Asked, out: Path) -> None:
        self._folder = out / "servers"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._vocabulary = asked.vocabulary
        name = asked.label
        paths = [f"{adapter}={path}" for adapter, path in asked.adapters.items()]
        options = {"model_path": str(asked.model), "port": 0, "lora_paths": paths, **asked.options}
        config = self._folder / f"{name}.toml"
        config.write_text(_toml(options), "utf-8")
        self._log = self._folder / f"{name}.log"
        started_at = time.monotonic()
        with self._log.open("wb") as log:
            command = [sys.executable, "-c", "from rota.cli import main; main()", "serve", "--quiet", "--config"]
            self._process = subprocess.Popen(tied([*command, config]), stdout=log, stderr=log)
        self.url = self._wait_until_ready(started_at + START_S)
        self.start_s = time.monotonic() - started_at

    def run(self, scenario: Scenario, seed: int, limit_s: float) -> Outcome:
        # Here, because `--in-process` serves machines without the packages for HTTP.
        from rota.bench.config import BenchConfig
        from rota.bench.run import bench

        file = self._folder / f"{scenario.name}.toml"
        file.write_text(scenario_toml(scenario), "utf-8")
        config = BenchConfig(base_url=self.url, scenario=str(file), seed=seed, vocab_size=min(32_000, self._vocabulary))
        run = asyncio.run(asyncio.wait_for(bench(config, lambda _: lambda: None), limit_s))
        return Outcome(run.recorder, dict(run.problems))

    @property
    def pid(self) -> int:
        return self._process.pid

    def peak_rss_gb(self) -> float:
        return peak_rss_gb(self._process.pid)

    def stop(self) -> None:
        """Politely, then less so: a second signal lets nobody finish, and there is no answer to a third."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            try:
                self._process.wait(STOP_S)
                return
            except subprocess.TimeoutExpired:
                continue

    def _wait_until_ready(self, deadline: float) -> str:
        """The URL it announces; a server that ends instead has its last words in the log."""
        while self._process.poll() is None and time.monotonic() < deadline:
            if found := ANNOUNCEMENT.search(self._log.read_text("utf-8", "replace")):
                return found[1]
            time.sleep(LOOK_EVERY_S)
        self.stop()
        raise RuntimeError(f"rota serve did not start: {self._log.read_text('utf-8', 'replace')[-2000:]}")


def scenario_toml(scenario: Scenario) -> str:
    """A file that `read_scenario` reads back to the same."""
    table = dataclasses.asdict(scenario)
    clients, tenants = table.pop("clients"), table.pop("tenants")
    parts = [f"[[clients]]\n{_toml(client)}" for client in clients]
    parts += [f"[tenants.{json.dumps(tenant.pop('name'))}]\n{_toml(tenant)}" for tenant in tenants]
    return "\n".join([_toml(table), *parts])


def _toml(table: dict[str, Any]) -> str:
    """Names and values; JSON's strings, numbers, lists, true and false are TOML's too."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in table.items() if value is not None)


def _value(value: Any) -> str:
    """JSON's, but for a table."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_value(one)}' for name, one in value.items())} }}"
    return json.dumps(value)
