"""What became of a check, and how it travels."""

from __future__ import annotations

from dataclasses import dataclass

_FINAL, _PASSING = b"!", b"?"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a grammar cannot be followed; empty if it can. `is_final`: another check would say the same."""

    problem: str = ""
    is_final: bool = True

    @property
    def encoded(self) -> bytes:
        return (_FINAL if self.is_final else _PASSING) + self.problem.encode()

    @classmethod
    def decoded(cls, message: bytes) -> Verdict:
        return cls(message[1:].decode(), message[:1] == _FINAL)


DIED = Verdict("the process that checked it died; it may need too much memory.", is_final=False)


def overdue(limit_s: float) -> Verdict:
    """The machine may have been busy."""
    return Verdict(f"it took longer than {limit_s:g} seconds to check. Make it smaller.", is_final=False)
