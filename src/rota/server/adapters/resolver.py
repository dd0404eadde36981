"""The resolver loads adapters that a request names and the server was not told of, from below one prefix."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.lora_paths import LoraPath
from rota.observe.audit import OK, log_act
from rota.runtime.registry import Registry
from rota.server.access.disclosure import reason_for
from rota.server.access.keys import Key
from rota.sources.prefix import Prefix, is_within
from rota.sources.source import NothingError

# As long as a request waits for its adapter. The load goes on, and the next request finds it further.
TIMEOUT_S = 120.0
# Names that are looked for at a time, and how long a name that was not found is not looked for again.
MOST_AT_ONCE, MOST_MISSED = 64, 10_000
MISSED_S = 5.0


# The roots of keys, each with the tenant whose it is.
Roots = Callable[[], Mapping[str, str | None]]


class Resolver:
    """For the event loop. Many who ask for one name wait for one load."""

    def __init__(
        self,
        prefix: Prefix,
        registry: Registry,
        load: Callable[[LoraPath], Awaitable[object]],
        roots: Roots = dict,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` raises AdapterError. `roots` gives the adapter roots of all keys."""
        self._prefix, self._registry, self._load, self._roots = prefix, registry, load, roots
        self._timeout_s, self._now = timeout_s, now
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._missed: dict[str, float] = {}  # names, and when they were

    async def resolve(self, key: Key, model: str | None, param: str = "model", client: str = "unknown") -> None:
        """Load what a name stands for, if it is not known and there is such an adapter; else nothing happens.

        Every load has its line in the audit log, with the key and the address of the client that asked first. Raises
        RequestError if the key may not, or if the adapter cannot be served.
        """
        if model is None or self._registry.get(model) is not None:
            return
        name = model.removeprefix(f"{self._registry.base.name}:")
        entry = self._prefix.entry(name, self._roots())
        if entry is None or not key.may_use(name) or self._was_missed(name):
            return  # the search for the name refuses it
        if key.adapter_root is not None and not key.may_operate and not is_within(entry, key.adapter_root):
            message = f"Key '{key.name}' may not use '{name}': it lies outside of the key's adapter root."
            _log(key, client, entry, message)
            raise RequestError(Fault(FaultCode.FORBIDDEN, message, param))
        try:
            await self._wait_for(entry, param, key, client)
        except AdapterError as error:
            message = f"Adapter '{name}' could not be loaded: {reason_for(key, _without(self._prefix, str(error)))}"
            raise RequestError(Fault(error.code, message, param)) from None

    async def _wait_for(self, entry: LoraPath, param: str, key: Key, client: str) -> None:
        task = self._loads.get(entry.name)
        if task is None:
            if len(self._loads) >= MOST_AT_ONCE:
                message = f"{MOST_AT_ONCE} adapters are being loaded for the first time; ask again in a while."
                raise RequestError(Fault(FaultCode.QUEUE_FULL, message, param))
            task = self._loads[entry.name] = asyncio.create_task(self._bring(entry, key, client))
            task.add_done_callback(lambda _: self._loads.pop(entry.name, None))
        done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        if not done:
            message = f"Adapter '{entry.name}' is still being loaded after {self._timeout_s:g} seconds; ask again."
            raise RequestError(Fault(FaultCode.TIMED_OUT, message, param))
        await task

    async def _bring(self, entry: LoraPath, key: Key, client: str) -> None:
        try:
            if await asyncio.to_thread(self._prefix.is_missing, entry):
                raise NothingError("There is no such folder.")
            await self._load(entry)
        except NothingError:
            self._miss(entry.name)
        except BaseException as error:  # also CancelledError: every way out has its line
            if isinstance(error, AdapterError) and self._registry.get(entry.name) is not None:
                return  # another has loaded the name meanwhile
            _log(key, client, entry, str(error) or type(error).__name__)
            raise
        else:
            _log(key, client, entry)

    def _was_missed(self, name: str) -> bool:
        return self._now() - self._missed.get(name, -MISSED_S) < MISSED_S

    def _miss(self, name: str) -> None:
        if len(self._missed) >= MOST_MISSED:
            self._missed.clear()
        self._missed[name] = self._now()


def _log(key: Key, client: str, entry: LoraPath, outcome: str = OK) -> None:
    log_act("load", key.name, client, outcome, adapter=entry.name, path=entry.path, resolved=True)


def _without(prefix: Prefix, text: str) -> str:
    """Clients ask for names; where their adapters lie is the operator's business."""
    return text.replace(f"{prefix.place}/", "").replace("the adapter root of this key", "its place")
