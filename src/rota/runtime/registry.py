"""The registry knows the names of the base model and its adapters, and the version that each name means now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import count

from rota.core.adapter import BASE_LABEL, OTHER_LABEL, Adapter, listed, split_label
from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.ids import BASE, AdapterId
from rota.core.lora_paths import LoraPath

# ── version numbers ─────────────────────────────────────────────────────────────────────────────────────────────────
# Version numbers count what was loaded under each name.

# Names that were unloaded and are still remembered, so that a client who loads new names for ever fills no memory.
MOST_AT_REST = 10_000


class VersionNumbers:
    """A number is given once: a name that is unloaded and loaded again goes on counting.

    Only the names that were unloaded longest ago begin again, once there are many of them.
    """

    def __init__(self, most_at_rest: int = MOST_AT_REST) -> None:
        self._last: dict[str, int] = {}
        self._at_rest: dict[str, None] = {}
        self._most_at_rest = most_at_rest

    def next(self, name: str) -> int:
        self._at_rest.pop(name, None)
        number = self._last[name] = self._last.get(name, 0) + 1
        return number

    def rest(self, name: str) -> None:
        """The name is loaded no more."""
        self._at_rest[name] = None
        if len(self._at_rest) > self._most_at_rest:
            oldest = next(iter(self._at_rest))
            del self._at_rest[oldest], self._last[oldest]


_ASKED = tuple(one.name for one in fields(LoraPath))


@dataclass(slots=True)
class KnownVersion:
    """A version of an adapter, and how it stands with clients."""

    adapter: Adapter
    is_coming: bool = False  # it is being read beside a current one
    is_kept: bool = False  # it stays until it is removed, though its name means another version
    is_leaving: bool = False  # with its last user
    has_served: bool = False  # an engine could read it once
    loss: Fault | None = None  # why it cannot be read any more


class Registry:
    """The base model and its adapters, each in one or more versions.

    Every version has an id of its own, so that KV of the old weights is never used for the new weights. A name is known
    from `add` on: requests wait while its adapter is being read. A later version comes by `renew`, and no request can
    ask for it before `switch` or `stage`. An adapter is lost if it cannot be read when its turn comes, after the start
    or after a restart of the engine. Its name stays, and its requests are refused with the reason.
    """

    def __init__(self, base_name: str, base_path: str) -> None:
        self.base = Adapter(adapter_id=BASE, name=base_name, path=base_path)
        self._ids = count(BASE + 1)
        self._numbers = VersionNumbers()
        self._by_name: dict[str, KnownVersion] = {}  # the current versions
        self._beside: dict[str, dict[int, KnownVersion]] = {}  # former, staged and coming ones, by name and number
        self._by_id: dict[AdapterId, KnownVersion] = {}  # all of these
        self._prefix = f"{base_name}:"
        self._operator_names: set[str] = set()

    @property
    def adapters(self) -> list[Adapter]:
        """The current versions, in the order of their names' adding."""
        return [one.adapter for one in self._by_name.values()]

    @property
    def others(self) -> list[Adapter]:
        """The versions that are there and that their names do not mean."""
        return [one for numbered in self._beside.values() for one in _there(numbered.values())]

    def has(self, adapter: Adapter) -> bool:
        """Whether the name still means this adapter: it was not removed, nor loaded again."""
        return self.loaded(adapter.name) == adapter

    def versions(self, name: str) -> list[Adapter]:
        """What requests can ask for under a name: other versions by number, then the current one."""
        beside, current = self._beside.get(name, {}), self.loaded(name)
        return [*_there(beside[number] for number in sorted(beside)), *([current] if current else [])]

    def add(self, asked: LoraPath) -> Adapter:
        """Give a name an id; `forget` it if the adapter turns out to be bad."""
        self.refuse_name(asked.name)
        if asked.name in self._by_name:
            raise AdapterError(
                f"An adapter named '{asked.name}' is already loaded; unload it first, or take another name."
            )
        if asked.owner is None:
            self._operator_names.add(asked.name)
        version = self._by_name[asked.name] = self._made(asked)
        return version.adapter

    def renew(self, asked: LoraPath) -> Adapter:
        """The next version of a loaded name, which still means the old one; `discard` it if it turns out to be bad."""
        if asked.name not in self._by_name:
            raise AdapterError(f"No adapter named '{asked.name}' is loaded, so there is none to renew.")
        version = self._made(asked)
        version.is_coming = True
        self._put_beside(version)
        return version.adapter

    def coming(self, name: str) -> list[Adapter]:
        """The versions of a name that are being read."""
        return [one.adapter for one in self._beside.get(name, {}).values() if one.is_coming]

    def switch(self, adapter: Adapter) -> KnownVersion:
        """A name means this version from now on. Returns the old one, which is found by its number until discarded."""
        new, old = self.stage(adapter), self._by_name[adapter.name]
        new.is_kept = False
        self._put_beside(old)
        self._by_name[adapter.name] = new
        self._take(adapter)
        return old

    def stage(self, adapter: Adapter) -> KnownVersion:
        """A version is found by its number from now on; its name means what it meant."""
        version = self._by_id.get(adapter.adapter_id)
        if version is None:
            raise AdapterError(f"Adapter '{adapter.name}' was unloaded before its new version was read.")
        version.is_coming = False
        self._put_beside(version)
        return version

    def _put_beside(self, version: KnownVersion) -> None:
        self._beside.setdefault(version.adapter.name, {})[version.adapter.version] = version

    def _take(self, adapter: Adapter) -> None:
        """Take a version from beside the current one, if it is there."""
        numbered = self._beside.get(adapter.name, {})
        numbered.pop(adapter.version, None)
        if not numbered:
            self._beside.pop(adapter.name, None)

    def _made(self, asked: LoraPath) -> KnownVersion:
        told = {field: getattr(asked, field) for field in _ASKED}
        adapter_id, number = AdapterId(next(self._ids)), self._numbers.next(asked.name)
        adapter = Adapter(**told, adapter_id=adapter_id, version=number)
        version = self._by_id[adapter.adapter_id] = KnownVersion(adapter)
        return version

    def refuse_name(self, name: str) -> None:
        """Raises AdapterError for a name that no adapter can have."""
        if not name.strip():
            raise AdapterError("An adapter needs a name that is not empty.")
        if name == self.base.name:
            raise AdapterError(f"'{name}' is the base model's name; take another for this adapter.")
        if name in (BASE_LABEL, OTHER_LABEL):
            raise AdapterError(
                f"An adapter cannot be called '{name}': metrics and logs use that word for something else; take "
                "another name for this adapter."
            )
        if name.startswith(self._prefix):
            raise AdapterError(
                f"'{name}' begins with '{self._prefix}', which clients may write before any adapter's name; "
                "take another for this adapter."
            )
        if split_label(name):
            raise AdapterError(
                f"'{name}' ends in '@' and a number, which is how clients ask for one version of an adapter; take "
                "another for this adapter."
            )

    def loaded(self, name: str) -> Adapter | None:
        """The adapter that was loaded under exactly this name."""
        version = self._by_name.get(name)
        return version.adapter if version else None

    def is_operators(self, name: str) -> bool:
        """Whether the server started with an adapter of this name. The name stays the operator's when it is gone."""
        return name in self._operator_names

    def forget(self, name: str) -> Adapter:
        """Forget a name with all its versions; raises AdapterError if it is not known."""
        adapter = self.loaded(name)
        if adapter is None:
            raise AdapterError(f"No adapter named '{name}' is loaded; loaded are: {listed(sorted(self._by_name))}.")
        for one in [*self.versions(name), *self.coming(name)]:
            self.discard(one.adapter_id)
        return adapter

    def is_lost(self, adapter: Adapter) -> bool:
        version = self._by_id.get(adapter.adapter_id)
        return version is not None and version.loss is not None

    def discard(self, adapter_id: AdapterId) -> None:
        """Forget the version that has this id, if there is one, and its name if the name means this version."""
        version = self._by_id.pop(adapter_id, None)
        if version is None:
            return
        name = version.adapter.name
        if self._by_name.get(name) is version:
            del self._by_name[name]
            self._numbers.rest(name)
        self._take(version.adapter)

    def version(self, adapter_id: AdapterId) -> KnownVersion | None:
        """The version that has this id now; the base model is none."""
        return self._by_id.get(adapter_id)

    def by_id(self, adapter_id: AdapterId) -> Adapter | None:
        """The adapter that has this id now."""
        version = self._by_id.get(adapter_id)
        return version.adapter if version else None

    def name_of(self, adapter_id: AdapterId) -> str | None:
        """The name of the version that has this id now."""
        adapter = self.base if adapter_id == BASE else self.by_id(adapter_id)
        return adapter.name if adapter else None

    def get(self, model: str | None) -> Adapter | None:
        """As `find`, but None for an unknown name."""
        if model is None or model == self.base.name:
            return self.base
        return self.exact(model.removeprefix(self._prefix))

    def exact(self, label: str) -> Adapter | None:
        """A loaded name, or a version of one as `name@version`."""
        if loaded := self.loaded(label):
            return loaded
        name, number = split_label(label) or (label, 0)
        return next((one for one in self.versions(name) if one.version == number), None)

    def find(self, model: str | None) -> Adapter:
        """The base model for None or its name; an adapter for its name, `name@version` or `base:adapter`.

        An unknown name is refused, never served by the base model.
        """
        adapter = self.get(model)
        if adapter is None:
            known = listed([self.base.name, *sorted(self._by_name)])
            message = f"There is no model or adapter named '{model}'; known are: {known}."
            raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "model"))
        self.refuse_lost(adapter)
        return adapter

    def refuse_lost(self, adapter: Adapter, param: str = "model") -> None:
        """Raises RequestError with the reason if an adapter is lost."""
        version = self._by_id.get(adapter.adapter_id)
        if version and (loss := version.loss):
            if loss.code is FaultCode.QUARANTINED:
                raise RequestError(replace(loss, param=param))
            message = (
                f"Adapter '{adapter.name}' could not be read: {loss.message} Load it again under this name, or unload "
                "it."
            )
            raise RequestError(Fault(loss.code, message, param))


def _there(versions: Iterable[KnownVersion]) -> list[Adapter]:
    """Those that were read."""
    return [one.adapter for one in versions if not one.is_coming]
