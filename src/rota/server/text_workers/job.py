"""A job is one large body on its way to a worker process and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rota.core.errors import Fault
from rota.server.prompts import TextLimits, Texts
from rota.text.parsers import Parsers


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker does with the bytes that follow. `work` travels by its name."""

    work: Callable[[Texts, bytes], Any]
    limits: TextLimits
    parsers: Parsers


@dataclass(frozen=True, slots=True)
class Done:
    """What a worker answers: a result, a refusal, or the traceback of a bug."""

    result: Any = None
    fault: Fault | None = None
    traceback: str = ""
    # The worker has grown too large and ends after this job.
    is_last: bool = False
