"""The adapter manager loads, renews and unloads adapters while the server runs, and waits for the engines' word."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakValueDictionary

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError, DiskError, Fault, FaultCode, RequestError, RotaError
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AddAdapter, MoveRequests, RemoveAdapter
from rota.observe.audit import OK, log_act
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.sources.source import UnreachableError
from rota.sources.sources import Locator

# ── adapter names ───────────────────────────────────────────────────────────────────────────────────────────────────
# An adapter's name appears in lists, log lines and metrics, so it is short and printable.

MAX_NAME = 200


def check_name(name: str) -> None:
    """Raises AdapterError for a name that is too long, or has characters that cannot be shown."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise AdapterError(f"An adapter's name has at most {MAX_NAME} characters, all of them printable.")


# ── terms ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Terms say how a new version of an adapter takes the place of the old one.


class Mode(StrEnum):
    """What a new version means for its name and for the answers that run."""

    FINISH = "finish"  # the name means the new version; running answers end under theirs
    SWITCH = "switch"  # the name means the new version, and running answers go on under it
    STAGE = "stage"  # the name means what it meant; `name@version` asks for the new version


@dataclass(frozen=True, slots=True)
class Terms:
    """How a new version takes the place of the old one."""

    mode: Mode = Mode.FINISH
    keeps_old: bool = False  # the old version stays until it is removed; else it leaves with its last user
    keeps_kv: bool = False  # of answers that go on under the new version


AT_ONCE = Terms()


# ── outcomes ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Outcomes are what the engine says of adapters, for those who wait for it.


class Outcomes:
    """Of one kind: loads, or unloads. Everything here runs on the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[AdapterId, asyncio.Future[None]] = {}

    def of(self, adapter_id: AdapterId) -> asyncio.Future[None]:
        """Called after the message is sent. Its answer comes through the event loop, so never before this call."""
        outcome = self._waiting.get(adapter_id)
        if outcome is None or outcome.done():
            outcome = self._waiting[adapter_id] = asyncio.get_running_loop().create_future()
        return outcome

    def resolve(self, adapter_id: AdapterId, error: RotaError | None = None) -> None:
        """Whoever waits goes on, or gets this error."""
        outcome = self._waiting.pop(adapter_id, None)
        if outcome is None or outcome.done():
            return  # done: the client has left
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)


def _error_of(event: AdapterRefused) -> RotaError:
    """Why an adapter cannot be loaded, which may be none of the adapter's fault."""
    match event.code:
        case FaultCode.ENGINE_DIED | FaultCode.QUARANTINED:
            return RequestError(Fault(event.code, event.reason))
        case FaultCode.SOURCE_AWAY:
            return UnreachableError(event.reason)
        case FaultCode.DISK_FULL | FaultCode.DISK_FAILED:
            return DiskError(event.reason, event.code)
    return AdapterError(event.reason)


# ── locating ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Adapters of sources are located in threads of their own: a slow source must not take the threads of others.

# Gives an adapter that is asked for the address of what lies there now. Raises AdapterError.
Locate = Callable[[LoraPath], Awaitable[LoraPath]]

THREADS = 8


async def as_asked(asked: LoraPath) -> LoraPath:
    """For a server without sources."""
    return asked


def locating(locator: Locator) -> Locate:
    """For the event loop, which does not wait: it hears of the address in its time."""
    pool = ThreadPoolExecutor(THREADS, "adapter-listing")

    async def locate(asked: LoraPath) -> LoraPath:
        if not locator.may_be_far(asked):
            return asked
        return await asyncio.get_running_loop().run_in_executor(pool, locator.locate, asked)

    return locate


# ── adapters ────────────────────────────────────────────────────────────────────────────────────────────────────────

# Most answers end within this time, and most clients wait longer.
TIMEOUT_S = 30.0

LOG = logging.getLogger("rota.adapters")


# Says of what is asked for whether it may be, and whose it is, as of now. Raises RequestError if it may not be.
Decide = Callable[[LoraPath], LoraPath]


def as_it_is(asked: LoraPath) -> LoraPath:
    """For what the server itself asks for."""
    return asked


class AdapterManager:
    """Loads, renews and unloads adapters by name. Everything here runs on the event loop."""

    def __init__(
        self,
        service: Service,
        registry: Registry,
        timeout_s: float = TIMEOUT_S,
        locate: Locate = as_asked,
        reloads_changed: bool = False,
    ) -> None:
        """`locate` finds what an address means now, before a version gets its id.

        With `reloads_changed`, files that changed since they were loaded become a new version by themselves.
        """
        self._service = service
        self._registry = registry
        self._timeout_s = timeout_s
        self._loading, self._unloading = Outcomes(), Outcomes()
        # Those that an update holds or waits for.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._locate, self._reloads_changed = locate, reloads_changed
        self._reloads: set[asyncio.Task[None]] = set()
        # Say whether a version must stay though its name means another. Who begins to say no calls `retire`.
        self.holders: list[Callable[[Adapter], bool]] = []
        # Hear of versions before an engine reads them, and when no engine will read them again. The first may refuse a
        # version with a RequestError, and is told whether another leaves for it.
        self.on_new: Callable[[Adapter, bool], None] = lambda *_: None
        self.on_gone: Callable[[AdapterId], None] = lambda _: None
        # Hears of a name that is unloaded with all its versions, before anything else happens.
        self.on_unload: Callable[[str], object] = lambda _: None

    async def load(self, asked: LoraPath, decide: Decide = as_it_is) -> Adapter:
        """Returns when the adapter can serve requests. Raises AdapterError with the reason if it cannot.

        The name of a lost adapter may be loaded again. If that fails, the name stays lost. `decide` is asked at the
        instant when the name gets its adapter: what was so when the call began may not be so any more.
        """
        if (old := self._registry.loaded(asked.name)) and self._registry.is_lost(old):
            return await self.update(asked, decide=decide)
        return await self._add(decide(await self._locate(asked)))

    def _lock(self, name: str) -> asyncio.Lock:
        """Lets one update of a name at a time go on, in the order in which they came."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _add(self, asked: LoraPath) -> Adapter:
        adapter = self._registry.add(asked)
        await self._read(adapter, is_more=True)
        return adapter

    async def update(self, asked: LoraPath, terms: Terms = AT_ONCE, decide: Decide = as_it_is) -> Adapter:
        """As `load`, for a name that is loaded already, or not. A failure changes nothing: the old version serves on.

        A name is updated once at a time: otherwise, the version that is read longest would win. `decide` is asked under
        the name's lock, before the version is read and once more before the name means it.
        """
        async with self._lock(asked.name):
            asked = decide(await self._locate(asked))
            old = self._registry.loaded(asked.name)
            if old is None:
                return await self._add(asked)
            adapter = self._registry.renew(asked)
            is_staged = terms.mode is Mode.STAGE
            await self._read(adapter, is_staged or terms.keeps_old, None if is_staged else old)
            try:
                decide(asked)
            except RotaError:
                self._drop(adapter)
                raise
            self._take_over(adapter, terms)
            return adapter

    async def use(self, adapter: Adapter, terms: Terms = AT_ONCE, check: Callable[[], object] = lambda: None) -> None:
        """A name means this version of it from now on: one that was staged or kept. `check` may refuse that."""
        async with self._lock(adapter.name):
            check()
            if self._registry.by_id(adapter.adapter_id) is None:
                raise AdapterError(f"Version {adapter.version} of '{adapter.name}' was unloaded; load it again.")
            if self.is_leaving(adapter):
                raise AdapterError(f"Version {adapter.version} of '{adapter.name}' is leaving; load it again.")
            self._take_over(adapter, terms)

    def _take_over(self, adapter: Adapter, terms: Terms) -> None:
        if terms.mode is Mode.STAGE:
            self._registry.stage(adapter).is_kept = True
            return
        old = self._registry.switch(adapter)
        if terms.keeps_old and old.adapter != adapter:
            old.is_kept = True
        if terms.mode is Mode.SWITCH:
            self._move(adapter, old.adapter, terms.keeps_kv)
        self.retire(adapter.name)

    def _move(self, adapter: Adapter, old: Adapter, keeps_kv: bool) -> None:
        """Answers of the version before, and of those that are still leaving, go on under this one."""
        for one in self._registry.versions(adapter.name)[:-1]:
            if one == old or self.is_leaving(one):
                self._service.send(
                    MoveRequests(old=one.adapter_id, new=adapter.adapter_id, at=time.monotonic(), keeps_kv=keeps_kv)
                )

    def is_leaving(self, adapter: Adapter) -> bool:
        """Whether a version leaves with its last user."""
        version = self._registry.version(adapter.adapter_id)
        return version is not None and version.is_leaving

    def retire(self, name: str) -> None:
        """Versions that a name does not mean, and that are neither kept nor held, leave with their last users.

        A lost version has no users: it is forgotten at once.
        """
        for one in self._registry.versions(name)[:-1]:
            version = self._registry.version(one.adapter_id)
            if version and not (version.is_leaving or version.is_kept or any(holds(one) for holds in self.holders)):
                version.is_leaving = True
                with suppress(RequestError):  # the service is down, and all versions with it
                    self._service.send(
                        RemoveAdapter(adapter_id=one.adapter_id, at=time.monotonic(), takes_requests=True)
                    )
                if self._registry.is_lost(one):
                    self._forget(one.adapter_id)

    async def _read(self, adapter: Adapter, is_more: bool, former: Adapter | None = None) -> None:
        """Have a version read, checked and copied to the place of a former one, if there is room for both.

        Raises AdapterError with the reason; then nothing of it is left.
        """
        adapter_id = adapter.adapter_id
        try:
            self.on_new(adapter, is_more)
            former_id = None if former is None else former.adapter_id
            self._service.send(AddAdapter(adapter=adapter, at=time.monotonic(), former=former_id))
            await self._loading.of(adapter_id)
        except RequestError:
            self._forget(adapter_id)
            raise
        except asyncio.CancelledError:
            self._drop(adapter)
            raise
        if self._registry.by_id(adapter_id) is None:
            raise AdapterError(f"Adapter '{adapter.name}' was unloaded before it was read.")

    def _drop(self, adapter: Adapter) -> None:
        """Take back a version that no name means yet."""
        self._registry.discard(adapter.adapter_id)
        self._service.send(RemoveAdapter(adapter_id=adapter.adapter_id, at=time.monotonic()))

    async def unload(self, name: str) -> bool:
        """Refuse new requests for a name at once, then wait for its open ones. False: they outlast the wait."""
        leavers = [*self._registry.versions(name), *self._registry.coming(name)]
        self._registry.forget(name)
        self.on_unload(name)
        return await self._remove(leavers)

    async def unload_version(self, adapter: Adapter) -> bool:
        """The same for one version, which its name does not mean."""
        if self._registry.has(adapter):
            raise AdapterError(
                f"'{adapter.name}' means version {adapter.version} now; let it mean another version first, or unload "
                f"'{adapter.name}' with all its versions."
            )
        self._registry.discard(adapter.adapter_id)
        return await self._remove([adapter])

    async def _remove(self, leavers: Iterable[Adapter]) -> bool:
        waits = []
        for one in leavers:
            self._service.send(RemoveAdapter(adapter_id=one.adapter_id, at=time.monotonic()))
            waits.append(self._unloading.of(one.adapter_id))
        _, late = await asyncio.wait(waits, timeout=self._timeout_s)
        return not late

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case AdapterAdded(adapter_id):
                    if version := self._registry.version(adapter_id):
                        version.has_served, version.loss = True, None
                    self._loading.resolve(adapter_id)
                case AdapterRefused(others_serve=True):
                    self._warn(event)
                case AdapterRefused(adapter_id=adapter_id):
                    self._refused(event)
                    self._loading.resolve(adapter_id, _error_of(event))
                    self._unloading.resolve(adapter_id)
                case AdapterRemoved(adapter_id):
                    self._forget(adapter_id)
                    self._unloading.resolve(adapter_id)

    def _refused(self, event: AdapterRefused) -> None:
        """An engine reads adapters after its start, and the folder of one may be gone or its weights bad."""
        version = self._registry.version(event.adapter_id)
        if version is None or version.is_leaving:
            return self._forget(event.adapter_id)
        adapter = version.adapter
        if not version.has_served and (event.code is not FaultCode.QUARANTINED or adapter.owner is not None):
            return self._forget(event.adapter_id)
        version.loss = Fault(event.code, event.reason)
        self._warn(event)
        if self._reloads_changed and event.code is FaultCode.ADAPTER_CHANGED and self._registry.has(adapter):
            task = asyncio.get_running_loop().create_task(self._reload(adapter))
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    async def _reload(self, adapter: Adapter) -> None:
        """What lies in the place of a version by now becomes the next one. It is an act of the key that loaded it."""
        outcome = OK
        async with self._lock(adapter.name):
            if not self._registry.has(adapter):
                return  # a client was faster
            try:
                new = self._registry.renew(adapter)
                await self._read(new, is_more=False, former=adapter)
                self._take_over(new, AT_ONCE)
            except (AdapterError, RequestError) as error:
                outcome = str(error)  # the name stays lost
        details = {"adapter": adapter.name, "path": adapter.path, "reloaded": True}
        log_act("update", adapter.owner or "operator", "this server", outcome, **details)

    def _forget(self, adapter_id: AdapterId) -> None:
        self._registry.discard(adapter_id)
        self.on_gone(adapter_id)

    def _warn(self, event: AdapterRefused) -> None:
        adapter = self._registry.by_id(event.adapter_id)
        fields = {"adapter": adapter.name if adapter else "", "engine": event.engine_id, "why": event.reason}
        LOG.warning("An adapter could not be read.", extra={"fields": fields})
