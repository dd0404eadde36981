"""The journal writes events as JSON, one line for each event, in order of time.

{"event":"asked","at":1.25,"request_id":"0-0000003","adapter_id":2,"adapter":"adapter2"}
{"event":"slot_changed","at":1.26,"slot":0,"adapter_id":2,"state":"loading","reason":"a slot was empty",…}
{"event":"admitted","at":1.27,"request_id":"0-0000003","cached_tokens":0}
{"event":"produced","at":1.29,"request_ids":["0-0000003"],"tokens":[17],"logprobs":[],…}
{"event":"finished","at":1.31,"request_id":"0-0000003","reason":"length","prompt_tokens":12,…}
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterable
from typing import IO, Any

import msgspec

from rota.core.events import Event
from rota.core.ids import AdapterId, RequestId


class Journal:
    """Writes to an open binary file; close the journal before the file."""

    def __init__(self, file: IO[bytes], name_of: Callable[[AdapterId], str] = str) -> None:
        self._file = file
        self._name_of = name_of
        self._encode = msgspec.json.Encoder().encode
        self._coming: list[tuple[float, RequestId, AdapterId, str]] = []  # requests whose time has not come

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, tenant: str = "") -> None:
        heapq.heappush(self._coming, (at, request_id, adapter, tenant))

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            self._write_asks(event.at)
            self._write({"event": _name(type(event)), **msgspec.to_builtins(event)})

    def close(self) -> None:
        self._write_asks(math.inf)

    def _write_asks(self, until: float) -> None:
        while self._coming and self._coming[0][0] <= until:
            at, request_id, adapter, tenant = heapq.heappop(self._coming)
            names = {"adapter_id": adapter, "adapter": self._name_of(adapter), **({"tenant": tenant} if tenant else {})}
            self._write({"event": "asked", "at": at, "request_id": request_id, **names})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(self._encode(line) + b"\n")


def _name(kind: type[Event]) -> str:
    """SlotChanged → slot_changed."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
