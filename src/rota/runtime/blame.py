"""Blame remembers which adapters engines died of, and sets one aside before it takes down every engine in turn.

An engine says what it reads before it reads it. If it hangs or fails while it reads one adapter, that adapter is read
alone by the next engine, behind all others. The second time the adapter is quarantined, until an operator lifts that.
If the engine reads several adapters when it dies, none is blamed: each of them is read alone from then on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rota.core.adapter import Adapter
from rota.core.errors import ConfigError, Fault, FaultCode, RequestError
from rota.core.messages import AddAdapter

LOG = logging.getLogger("rota.engine")

# Deaths that are further apart have nothing to do with each other.
REMEMBERED_S = 24 * 3600.0
MOST_DEATHS = 2
# A key may take another name for each adapter: its adapters are counted together.
MOST_DEATHS_OF_KEY = 4
MOST_QUARANTINES = 2
MOST_REMEMBERED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """An adapter that is not served."""

    name: str
    owner: str | None  # the name of the key that loaded it
    path: str
    since: float  # in seconds since 1970
    reason: str

    @property
    def fault(self) -> Fault:
        """What every client may read; the reason is for operators."""
        message = f"Adapter '{self.name}' is quarantined: engines died while they read it. An operator may lift that."
        return Fault(FaultCode.QUARANTINED, message, "model")

    def covers(self, adapter: Adapter) -> bool:
        """Whether this is the adapter, or what its key loads in its place. Other versions that were read serve on."""
        is_next = self.owner is not None and self.owner == adapter.owner and not adapter.seals
        return self.name == adapter.name and (self.path == adapter.path or is_next)


@dataclass(frozen=True, slots=True)
class _SuspectDeath:
    name: str
    owner: str | None
    at: float


class Blame:
    """For all engines of a server, and for any thread.

    Quarantines are kept in a file, and outlast the server. Deaths that did not lead to one do not.
    """

    def __init__(self, path: Path | None = None, now: Callable[[], float] = time.time) -> None:
        """Raises ConfigError if the file of `path` is there and cannot be read."""
        self._path, self._now = path, now
        self._lock = threading.Lock()
        self._deaths: list[_SuspectDeath] = []
        self._doubted: dict[str, None] = {}  # names, the oldest first
        self._quarantines: dict[str, Quarantine] = {}
        self._times: dict[str, int] = {}  # how often adapters of a key were quarantined
        if path and path.exists():
            self._read(path)

    @property
    def quarantines(self) -> Sequence[Quarantine]:
        """In the order of their beginning."""
        return list(self._quarantines.values())

    @property
    def barred(self) -> Sequence[str]:
        """The keys that may load nothing until an operator gives them that right back."""
        return [key for key, times in list(self._times.items()) if times >= MOST_QUARANTINES]

    def quarantine_of(self, adapter: Adapter) -> Quarantine | None:
        found = self._quarantines.get(adapter.name)
        return found if found and found.covers(adapter) else None

    def refuse_name(self, name: str) -> None:
        """Raises RequestError for the name of a quarantined adapter."""
        if found := self._quarantines.get(name):
            raise RequestError(found.fault)

    def judged(self, message: AddAdapter) -> AddAdapter:
        """What an engine is told of an adapter: to refuse it, to read it alone, or what is asked."""
        adapter = message.adapter
        if found := self.quarantine_of(adapter):
            return replace(message, refusal=found.fault.message, refusal_code=FaultCode.QUARANTINED)
        if adapter.name in self._doubted:
            return replace(message, adapter=replace(adapter, is_read_alone=True))
        return message

    def note_death(self, reading: Sequence[Adapter], why: str) -> Adapter | None:
        """An engine died by itself while it read these. Gives the one that it died of, if that is known."""
        with self._lock:
            for adapter in reading:
                self._doubted.pop(adapter.name, None)
                self._doubted[adapter.name] = None
            for name in list(self._doubted)[:-MOST_REMEMBERED]:
                del self._doubted[name]
            if len(reading) != 1:
                return None
            self._condemn(reading[0], why)
            return reading[0]

    def _condemn(self, adapter: Adapter, why: str) -> None:
        now, owner = self._now(), adapter.owner
        recent = [one for one in self._deaths if now - one.at < REMEMBERED_S][-MOST_REMEMBERED:]
        self._deaths = [*recent, _SuspectDeath(adapter.name, owner, now)]
        deaths = sum((one.name, one.owner) == (adapter.name, owner) for one in self._deaths)
        if owner and sum(one.owner == owner for one in self._deaths) >= MOST_DEATHS_OF_KEY:
            self._times[owner] = max(self._times.get(owner, 0), MOST_QUARANTINES - 1)  # this one is the last
            deaths = MOST_DEATHS
        fields: dict[str, Any] = {"adapter": adapter.name, "key": owner, "why": why}
        if deaths < MOST_DEATHS:
            LOG.warning("An engine died while it read this adapter, which is read alone now.", extra={"fields": fields})
            return
        reason = f"an engine died while it read this adapter, and another one before. The last time: {why}"
        self._quarantines[adapter.name] = Quarantine(
            name=adapter.name, owner=owner, path=adapter.path, since=now, reason=reason
        )
        if owner:
            self._times[owner] = self._times.get(owner, 0) + 1
        LOG.error("An adapter is quarantined.", extra={"fields": {**fields, "key_may_load": owner not in self.barred}})
        self._write()

    def lift(self, name: str) -> bool:
        """The adapter may be loaded again. It is read alone once more. False: there is no such quarantine."""
        with self._lock:
            found = self._quarantines.pop(name, None)
            self._deaths = [one for one in self._deaths if one.name != name]
            if found:
                self._write()
        return found is not None

    def give_back(self, key: str) -> bool:
        """A key may load again. False: it was not barred."""
        with self._lock:
            was_barred = key in self.barred
            if was_barred:
                del self._times[key]
                self._deaths = [one for one in self._deaths if one.owner != key]
                self._write()
        return was_barred

    def _read(self, path: Path) -> None:
        try:
            kept = json.loads(path.read_bytes())
            found = [Quarantine(**one) for one in kept["adapters"]]
            self._times = {str(key): int(times) for key, times in kept["keys"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"Cannot read the quarantined adapters in {path} ({reason}); remove the file.") from None
        self._quarantines = {one.name: one for one in found}

    def _write(self) -> None:
        if self._path is None:
            return
        kept: Mapping[str, Any] = {"adapters": [asdict(one) for one in self.quarantines], "keys": self._times}
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(json.dumps(kept, indent=1))
            os.replace(new, self._path)
        except OSError as error:
            fields = {"file": str(self._path), "why": error.strerror}
            LOG.error("The quarantined adapters cannot be kept over a restart.", extra={"fields": fields})


def kept_beside(key_file: str | None) -> Path | None:
    """Where a server keeps what it has quarantined: beside its key file. None: only while it runs."""
    return Path(f"{key_file}.quarantine.json") if key_file else None
