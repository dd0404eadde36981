"""Extensions stand around the kernel. Each lies in one folder, has one face, and may be left out of an installation.

The kernel makes tokens for tenants. It imports no extension: it finds the face of one here, by name, when a flag or a
route asks for it. An extension that needs another one imports the other's face alone.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from rota.core.errors import ConfigError

# A face of a dialect has ROUTES, and may have ERRORS: who writes the errors of paths that begin so.
DIALECTS = {
    "responses": "rota.server.responses.writer",
    "messages": "rota.server.messages.writer",
    "ollama": "rota.server.ollama.writer",
    "embeddings": "rota.server.embeddings.writer",
    "native": "rota.server.native.routes",
}
FACES = {
    **DIALECTS,
    "replicas": "rota.runtime.replicas.face",
    "ranks": "rota.runtime.ranks.face",
    "cluster": "rota.runtime.cluster.face",
    "dashboard": "rota.dashboard.routes",
    "bench": "rota.bench.config",
    "chat": "rota.commands.chat.command",
    "sim": "rota.sim",
    "workload": "rota.workload",
}


def found(name: str) -> ModuleType | None:
    """The face of an extension; None if its folder was left out."""
    try:
        return import_module(FACES[name])
    except ModuleNotFoundError as error:
        if error.name and f"{FACES[name]}.".startswith(f"{error.name}."):
            return None
        raise  # the folder is there, and lacks something that it needs


def needed(name: str, asked: str) -> ModuleType:
    """The face of an extension that was asked for. Raises ConfigError if its folder was left out."""
    if face := found(name):
        return face
    raise ConfigError(f"{asked} needs the extension '{name}', and this installation was made without it.")
