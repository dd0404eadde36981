"""To join a Ray cluster: the sentence of every way in which that fails, also of machines that are not alike."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rota.core.config import EngineConfig
from rota.core.errors import ConfigError
from rota.core.version import how_to_install
from rota.runtime.ranks.face import compared, facts, versions

# ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_ASK_S = 3.0
_HOW = (
    "Start a cluster with `ray start --head`, or join this machine to one with `ray start --address=HOST:6379`, and "
    "name it with --ray-address HOST:6379."
)

_TOKEN = (
    "If it asks for a token (RAY_AUTH_MODE=token), set up the same for this server; if its head has just ended, wait."
)


def chosen_address(asked: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The address of the cluster to join. Raises ConfigError for one that is no cluster's, or without Ray."""
    if find_spec("ray") is None:
        raise ConfigError(f"data_parallel_backend is 'ray', but Ray is not installed here: {how_to_install('ray')}.")
    address = asked or environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.rpartition(":")
    # "local" would start a cluster of its own, and ray:// is a proxy that no engine can reach the front through.
    if address != "auto" and ("/" in host or not host or not port.isdigit()):
        raise ConfigError(f"ray_address is '{address}', but must be HOST:PORT or 'auto'. {_HOW}")
    return address


def join(ray: Any, address: str) -> str:
    """Join the cluster; gives the reason if that fails. A cluster that does not answer may take a minute."""
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _ASK_S).close()
        ray.init(address=address, namespace="rota", log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # Ray fails in ways that it does not list
        ray.shutdown()
        return refusal(address, error)
    return ""


def refusal(address: str, error: Exception) -> str:
    """One sentence about a cluster that cannot be joined, and what to do."""
    words = in_one_line(str(error))
    if words.startswith("Version mismatch"):
        return f"The Ray cluster at {address} has other versions than this machine. {words}"
    if address == "auto" and isinstance(error, ConnectionError):
        return f"This machine belongs to no Ray cluster that runs. {_HOW}"
    if "Failed to connect" in words:  # the port is open
        return f"The Ray cluster at {address} does not let this server in ({words}). {_TOKEN}"
    return f"The Ray cluster at {address} cannot be joined ({words}). {_HOW}"


def in_one_line(words: str, most: int = 400) -> str:
    line = " ".join(words.split())
    return line if len(line) <= most else f"{line[:most]}…"


# ── alike ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A machine of the cluster must be like the front: the same versions, and the same model at the same path.


def own_versions() -> dict[str, str]:
    """Of what both sides must read alike, before anything else is read."""
    # Pickles of one minor version of Python are read by all its patches.
    return {"the version of python": ".".join(platform.python_version_tuple()[:2]), **versions("ray")}


def unlike(node: str, front: dict[str, str], theirs: dict[str, str]) -> str:
    """What differs on a machine, as a sentence; empty if nothing does."""
    found = compared("the front", front, f"node {node}", theirs)
    return f"Every node must have the model and the versions of the front: {'; '.join(found)}." if found else ""


def unlike_files(node: str, front: dict[str, str], config: EngineConfig) -> str:
    """What is missing, or differs, of the model on this machine; empty if nothing does."""
    path = config.model.model_path
    if path is not None and not Path(path).exists():
        return f"Node {node} has no {path}: the model must lie at the same path on every node."
    return unlike(node, front, facts(config))
