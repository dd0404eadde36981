"""A place says which rank a process is, and where rank 0 waits for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rota.core.errors import ConfigError

# torchrun itself listens on MASTER_PORT; rank 0 waits for the other ranks on the port behind it.
_NEXT_PORT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of the processes that torchrun has started, on one machine or on several."""

    rank: int
    size: int
    device_number: int
    local_ranks: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def torchrun_place(size: int, environ: Mapping[str, str]) -> Place | None:
    """What torchrun's environment says; None without one, and then rank 0 starts the others itself."""
    if size == 1 or not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    world = _number(environ, "WORLD_SIZE")
    if world != size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but WORLD_SIZE is {world}: start {size} processes, or unset RANK and "
            "WORLD_SIZE to have them started here."
        )
    return Place(
        rank=_number(environ, "RANK"),
        size=size,
        device_number=_number(environ, "LOCAL_RANK", 0),
        local_ranks=_number(environ, "LOCAL_WORLD_SIZE", 1),
        host=environ.get("MASTER_ADDR") or _missing("MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT") + _NEXT_PORT,
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    word = environ.get(name, "" if default is None else str(default))
    if not word:
        _missing(name)
    if not word.isdigit():
        raise ConfigError(f"{name} must be a whole number, not {word!r}.")
    return int(word)


def _missing(name: str) -> str:
    raise ConfigError(f"RANK and WORLD_SIZE are set, but {name} is not: start with torchrun, or unset both.")
