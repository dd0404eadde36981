"""Flags of another server, as `rota serve` takes them: those that are ours, those that need nothing, and the others."""

from __future__ import annotations

from docs.generate.tables import code, listed, table
from rota.commands.foreign import FOREIGN_FLAGS, ForeignFlag


def renamed_flags(server: str) -> str:
    rows = [(listed(_names(flag, server)), code(flag.ours), _sentence(flag)) for flag in _of(server) if flag.ours]
    return table(["there", "here", "what differs"], rows)


def needless_flags(server: str) -> str:
    return _with_sentences([flag for flag in _of(server) if flag.is_needless], server, "why it needs nothing")


def refused_flags(server: str) -> str:
    refused = [flag for flag in _of(server) if not flag.ours and not flag.is_needless]
    return _with_sentences(refused, server, "in its place")


def _with_sentences(flags: list[ForeignFlag], server: str, title: str) -> str:
    return table(["there", title], [(listed(_names(flag, server)), _sentence(flag)) for flag in flags])


def _of(server: str) -> list[ForeignFlag]:
    return [flag for flag in FOREIGN_FLAGS if _names(flag, server)]


def _names(flag: ForeignFlag, server: str) -> list[str]:
    names: str = getattr(flag, server)
    return names.split()


def _sentence(flag: ForeignFlag) -> str:
    return flag.sentence[:1].upper() + flag.sentence[1:]
