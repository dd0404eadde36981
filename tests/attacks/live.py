"""A whole server of the built-in model with two tenants' keys: `acme` attacks, and `birds` has an answer under way."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import rota
from tests.processes import Program, started
from tests.server.versions.serving import Paused
from tests.waiting import TIMEOUT_S, line_of, until

BUILT_IN = Path(rota.__file__).parent / "builtin_adapters"
TENANT = """
[keys.{name}]
key = "{name}"
adapters = ["{name}-*", "{name}/*", "shared-*", "pirate"]
may_use_base = true
may_load = true
adapter_root = "{name}"
"""
OPERATOR = '[keys.boss]\nkey = "boss"\nadapters = "all"\nmay_use_base = true\nmay_load = true\nmay_operate = true\n'
WEIGHTS = "adapter_model.safetensors"
# A pattern that is matched for ever.
BOMB = "([a-z0-9_.]+)+!"
KEYS = TENANT.format(name="acme") + TENANT.format(name="birds") + OPERATOR


@dataclass(frozen=True)
class Tenant:
    """A key's own folder, and a client that sends the key."""

    root: Path
    client: httpx.Client

    def put(self, adapter: str, folder: Path | str) -> httpx.Response:
        """Load a folder of the tenant's root as an adapter."""
        return self.client.put(f"/v1/adapters/{adapter}", json={"path": str(folder)})

    def pause(self, adapter: str, folder: Path) -> Paused:
        """Send a folder's weights in a body, and stop in the middle."""
        config = (folder / "adapter_config.json").read_text()
        body = (folder / "adapter_model.safetensors").read_bytes()
        return Paused(str(self.client.base_url), self.client.headers["x-api-key"], adapter, body, config)

    def owner_of(self, adapter: str) -> str | None:
        """Whose an adapter is, which operators see."""
        owner: str | None = self.client.get(f"/v1/adapters/{adapter}").json()["owner"]
        return owner

    def ask(self, model: str, max_tokens: int = 4) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": max_tokens})


@dataclass(frozen=True)
class Server:
    url: str
    program: Program
    keys: Path  # the key file
    acme: Tenant
    birds: Tenant
    boss: Tenant
    log: Path  # what the server writes to its standard error

    def acts(self, action: str) -> list[dict[str, Any]]:
        """The lines of the audit log about an action."""
        lines = (line for line in self.log.read_text().splitlines() if line.startswith("{") and line.endswith("}"))
        return [fields for fields in map(json.loads, lines) if fields.get("action") == action]

    def change_keys(self, old: str, new: str) -> None:
        """Change the key file and have it read; returns when its keys hold, which one more key tells."""
        before = self.keys.read_text()
        assert old in before
        probe = f"probe-{len(before)}"
        text = before.replace(old, new) + f'[keys.{probe}]\nkey = "{probe}"\n'
        later = self.keys.with_suffix(".new")
        later.write_text(text)
        later.chmod(0o600)
        later.rename(self.keys)
        self.program.send_signal(signal.SIGHUP)
        assert until(lambda: httpx.get(f"{self.url}/v1/models", headers={"x-api-key": probe}).status_code == 200)


@dataclass
class Gaps:
    """How long a neighbour waited between two tokens at most, quiet and beside the attack."""

    quiet_s: float = 0.0
    beside_s: float = 0.0
    tokens: int = 0  # that came beside the attack
    problems: list[str] = field(default_factory=list)  # answers that did not end well

    def __str__(self) -> str:
        return f"longest gap {self.beside_s:.3f} s, quiet {self.quiet_s:.3f} s"


def memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def good_adapter(folder: Path, name: str = "pirate") -> Path:
    """A folder with one of the built-in adapters, to spoil."""
    shutil.copytree(BUILT_IN / name, folder)
    return folder


def with_config(folder: Path, **fields: object) -> Path:
    """A good adapter whose configuration says something else."""
    path = good_adapter(folder) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@contextmanager
def serving(folder: Path, *flags: str, keys: str = KEYS) -> Iterator[Server]:
    """`rota serve` with both tenants' roots below `folder`/root; other flags may be added, and keys left out."""
    file, root = folder / "keys.toml", folder / "root"
    file.write_text(keys)
    file.chmod(0o600)
    for name in ("acme", "birds"):
        (root / name).mkdir(parents=True)
    command = [sys.executable, "-m", "rota", "serve", "--port", "0", "--log-format", "json"]
    access = ["--api-key-file", str(file)] if keys else []
    command += [*access, "--adapter-root", str(root), *flags]
    log = folder / "log"
    with log.open("w") as written, started(command, stderr=written) as program:
        url = line_of(program, "Rota serves").split()[-1]
        acme, birds, boss = (
            Tenant(root / name, httpx.Client(base_url=url, headers={"x-api-key": name}, timeout=TIMEOUT_S))
            for name in ("acme", "birds", "boss")
        )
        yield Server(url, program, file, acme, birds, boss, log)


@contextmanager
def neighbour(server: Server, quiet_s: float = 2.0) -> Iterator[Gaps]:
    """Birds streams answers, first alone for `quiet_s` and then through the block; the gaps are known behind it."""
    gaps, is_over, is_quiet = Gaps(), threading.Event(), threading.Event()

    def read() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
        while not is_over.is_set():
            last = time.monotonic()
            with server.birds.client.stream("POST", "/v1/completions", json=body) as stream:
                if stream.status_code != 200:
                    gaps.problems.append(f"{stream.status_code} {stream.read().decode()}")
                    return
                for line in stream.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    if '"error"' in line:
                        gaps.problems.append(line)
                        return
                    now = time.monotonic()
                    name = "beside_s" if is_quiet.is_set() else "quiet_s"
                    setattr(gaps, name, max(getattr(gaps, name), now - last))
                    last = now
                    gaps.tokens += is_quiet.is_set()
                    if is_over.is_set():
                        break

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(quiet_s)  # the gaps of a quiet time are what is measured
    is_quiet.set()
    try:
        yield gaps
    finally:
        is_over.set()
        reader.join()
