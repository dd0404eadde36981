"""Everything that can go wrong is one tree of errors.

RotaError
├── ConfigError        the configuration cannot work
├── ModelError         a model folder is missing, corrupt or unsupported
├── AdapterError       an adapter folder cannot be served by this model
│   ├── DiskError          a disk of the server's cannot take an adapter
│   ├── BusyError          an adapter was not read, and nothing is known of it
│   └── AdapterChangedError    the files of a version are others than when it was loaded
├── RequestError       a request cannot be served as asked; carries a Fault
├── EngineDiedError    the engine process is gone
│   └── EngineLostError    the engine served, and cannot be brought back
└── StuckError         requests wait, and no message will ever come
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self


class FaultCode(StrEnum):
    """Why a request ended without being served; the server maps each to one HTTP status."""

    BAD_FIELD = "bad_field"
    UNKNOWN_MODEL = "model_not_found"
    PROMPT_TOO_LONG = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    DUPLICATE_ID = "duplicate_id"
    UNKNOWN_ADAPTER = "unknown_adapter"
    ADAPTER_FAILED = "adapter_failed"
    ADAPTER_CHANGED = "adapter_changed"
    QUARANTINED = "adapter_quarantined"
    NOT_A_NUMBER = "not_a_number"
    ENGINE_DIED = "engine_died"
    UNAUTHORIZED = "invalid_api_key"
    FORBIDDEN = "forbidden"
    RATE_LIMITED = "rate_limit_exceeded"
    KEY_FULL = "key_limit_reached"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    UNKNOWN_REQUEST = "request_not_found"
    STOPPING = "server_stopping"
    TIMED_OUT = "request_timed_out"
    TEXT_WORKER_DIED = "text_worker_died"
    NOT_PAUSED = "not_paused"
    SOURCE_AWAY = "source_unavailable"
    DISK_FULL = "disk_full"
    DISK_FAILED = "disk_failed"


# What a read may fail of that says nothing of the adapter: the next read may succeed.
PASSING = frozenset({FaultCode.SOURCE_AWAY, FaultCode.DISK_FULL, FaultCode.DISK_FAILED})


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request failed: a sentence for a person, and a code for a program."""

    code: FaultCode
    message: str
    param: str | None = None


def prompt_too_long(size: str, most: int, param: str, why: str = "") -> Fault:
    """In the words that clients look for, who then send less, or ask a model with a larger context."""
    message = (
        f"The prompt is too long: {size}. This model's maximum context length is {most} tokens{why}, and the answer "
        "needs at least one of them."
    )
    return Fault(FaultCode.PROMPT_TOO_LONG, message, param)


class RotaError(Exception):
    """The root of everything Rota raises on purpose."""

    # Of a command that ends with this error: what was asked cannot work, and would not the next time.
    exit_code: ClassVar[int] = 2


class ConfigError(RotaError):
    """The configuration cannot work."""


class ModelError(RotaError):
    """A model folder is missing, corrupt or unsupported."""


class AdapterError(RotaError):
    """An adapter folder is missing, corrupt, or cannot be served by this model."""

    code = FaultCode.ADAPTER_FAILED

    def __init__(self, reason: str, code: FaultCode | None = None) -> None:
        """`code`: None for that of its class."""
        super().__init__(reason)
        self.code = code or self.code

    def reworded(self, reason: str) -> Self:
        """The same error, without what some clients may not read."""
        return type(self)(reason, self.code)


class DiskError(AdapterError):
    """A disk of the server's cannot take an adapter, whatever the adapter is."""

    @classmethod
    def at(cls, place: str, error: OSError, remedy: str) -> DiskError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the disk is full, or this user's share of it
            reason = f"There is no room for the adapter in {place} ({error.strerror}). Free some of that disk"
            return cls(f"{reason}, or {remedy}.", FaultCode.DISK_FULL)
        reason = f"The adapter cannot be written to {place} ({error.strerror}). Look after that disk"
        return cls(f"{reason}, or {remedy}.", FaultCode.DISK_FAILED)


class BusyError(AdapterError):
    """An adapter was not read because the machine is busy, or a process died; nothing is known of the adapter."""


class AdapterChangedError(AdapterError):
    """The files of a version are others than when it was loaded."""

    code = FaultCode.ADAPTER_CHANGED


class RequestError(RotaError):
    """A request cannot be served as asked."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault

    @classmethod
    def bad_field(cls, param: str, message: str) -> RequestError:
        return cls(Fault(FaultCode.BAD_FIELD, message, param))


class EngineDiedError(RotaError):
    """The engine process is gone."""


class EngineLostError(EngineDiedError):
    """The engine served, died, and cannot be brought back: a service manager should start the server again."""

    exit_code: ClassVar[int] = 70  # EX_SOFTWARE in <sysexits.h>


class StuckError(RotaError):
    """Requests wait, and no message will ever come: a bug in a policy, never a matter of load."""
