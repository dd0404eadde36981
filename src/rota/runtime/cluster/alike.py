"""A machine of the cluster must be like the front: the same versions, and the same model at the same path."""

from __future__ import annotations

import platform
from pathlib import Path

from rota.core.config import EngineConfig
from rota.runtime.ranks.facts import compared, facts, versions


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
