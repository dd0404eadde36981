"""The site is what an operator sets up: keys with their rights, and a folder of adapters for every tenant."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import rota

from .disk import Disk

_BUILT_IN = Path(rota.__file__).parent / "builtin_adapters"
OPERATOR, GUEST = "operator", "guest"


@dataclass(frozen=True, slots=True)
class TenantAdapter:
    """An adapter that a tenant loads over HTTP: a copy of a built-in adapter in the tenant's own folder."""

    name: str
    tenant: str
    like: str


ADAPTERS = (
    TenantAdapter("acme-one", "acme", "pirate"),
    TenantAdapter("acme-two", "acme", "haiku"),
    TenantAdapter("beta-one", "beta", "json"),
)
BASE = "SmolLM2-135M-Instruct"
# What each key may ask for; the operator may ask for everything.
MODELS = {
    "acme": (BASE, "acme-one", "acme-two", "french"),
    "beta": (BASE, "beta-one", "bullets"),
    GUEST: (BASE, "bullets"),
    OPERATOR: (BASE, "refusal", "pirate"),
}


@dataclass(slots=True)
class Site:
    """Files of one run; `secrets` are the keys that the server should know now."""

    folder: Path  # as the kernel names it: a path with a link in it is not a key's own
    disk: Disk
    secrets: dict[str, str] = field(default_factory=lambda: {name: f"sk-chaos-{name}" for name in MODELS})

    def __post_init__(self) -> None:
        for folder in (self.root, self.temporary):
            folder.mkdir()
        for adapter in ADAPTERS:
            self.restore(adapter)
        self.write_keys()

    @property
    def root(self) -> Path:
        return self.disk.folder / "adapters"

    @property
    def temporary(self) -> Path:
        """For the server's temporary files alone, so that a file that is left over is known."""
        return self.disk.folder / "tmp"

    def left_over(self) -> list[Path]:
        """The server's folders for sockets. It removes them as soon as its processes are connected."""
        return sorted(self.temporary.glob("rota-*"))

    @property
    def log(self) -> Path:
        return self.disk.folder / "server.log"

    @property
    def key_file(self) -> Path:
        return self.folder / "keys.toml"

    def folder_of(self, adapter: TenantAdapter) -> Path:
        return self.root / adapter.tenant / adapter.name

    def restore(self, adapter: TenantAdapter) -> None:
        """The adapter's folder as it was in the beginning."""
        folder = self.folder_of(adapter)
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(_BUILT_IN / adapter.like, folder)

    def weights_of(self, adapter: TenantAdapter) -> Path:
        return next(self.folder_of(adapter).glob("*.safetensors"))

    def write_keys(self, text: str | None = None) -> None:
        """Replace the key file at once, as a careful operator does; `text` in place of what it should hold."""
        fresh = self.key_file.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self._key_text() if text is None else text)
        fresh.replace(self.key_file)

    def model_for(self, rng: Random, key: str) -> str:
        return rng.choice(MODELS[key])

    def _key_text(self) -> str:
        return "\n".join(self._table(name, secret) for name, secret in self.secrets.items())

    def _table(self, name: str, secret: str) -> str:
        lines = [f"[keys.{name}]", f'key = "{secret}"', "may_use_base = true"]
        if name == OPERATOR:
            lines += ['adapters = "all"', "may_load = true", "may_operate = true"]
        elif name == GUEST:
            lines += ['adapters = ["bullets"]']
        else:
            names = ", ".join(f'"{model}"' for model in MODELS[name][1:])
            lines += [f'adapters = [{names}, "{name}-*"]', "may_load = true", f'adapter_root = "{name}"']
        if name == "acme":
            # Far more than its open requests take: it is met only if a reservation is never given back.
            lines.append("max_tokens_in_flight = 50_000")
        return "\n".join(lines) + "\n"
