"""The registry knows the names of the base model and its adapters, and the id that each name has now."""

from __future__ import annotations

from itertools import count

from rota.core.adapter import BASE_LABEL, OTHER_LABEL, Adapter
from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.ids import BASE, AdapterId
from rota.core.lora_paths import LoraPath


class Registry:
    """The base model and its adapters.

    A name that is loaded again gets a new id, so that KV of the old weights is never used for the new weights. A name
    is known from `add` on: requests wait while its adapter is being read. An adapter is lost if it cannot be read when
    its turn comes, after the start or after a restart of the engine. Its name stays, and its requests are refused with
    the reason.
    """

    def __init__(self, base_name: str, base_path: str) -> None:
        self.base = Adapter(adapter_id=BASE, name=base_name, path=base_path)
        self._ids = count(BASE + 1)
        self._by_name: dict[str, Adapter] = {}
        self._lost: dict[AdapterId, str] = {}  # and the reason
        self._prefix = f"{base_name}:"
        self._operator_names: set[str] = set()

    @property
    def adapters(self) -> list[Adapter]:
        """In the order of their adding."""
        return list(self._by_name.values())

    def has(self, adapter: Adapter) -> bool:
        """Whether the name still means this adapter: it was not removed, nor loaded again."""
        return self._by_name.get(adapter.name) == adapter

    def add(self, asked: LoraPath) -> Adapter:
        """Give a name an id; `forget` it if the adapter turns out to be bad."""
        if not asked.name.strip():
            raise AdapterError("An adapter needs a name that is not empty.")
        if asked.name == self.base.name:
            raise AdapterError(f"'{asked.name}' is the base model's name; take another for this adapter.")
        if asked.name in (BASE_LABEL, OTHER_LABEL):
            raise AdapterError(
                f"An adapter cannot be called '{asked.name}': metrics and logs use that word for something else; take "
                "another name for this adapter."
            )
        if asked.name.startswith(self._prefix):
            raise AdapterError(
                f"'{asked.name}' begins with '{self._prefix}', which clients may write before any adapter's name; "
                "take another for this adapter."
            )
        if asked.name in self._by_name:
            raise AdapterError(
                f"An adapter named '{asked.name}' is already loaded; unload it first, or take another name."
            )
        adapter_id = AdapterId(next(self._ids))
        adapter = Adapter(
            adapter_id=adapter_id,
            name=asked.name,
            path=asked.path,
            weight=asked.weight,
            is_pinned=asked.is_pinned,
            is_builtin=asked.is_builtin,
            root=asked.root,
            owner=asked.owner,
        )
        if asked.owner is None:
            self._operator_names.add(asked.name)
        self._by_name[asked.name] = adapter
        return adapter

    def loaded(self, name: str) -> Adapter | None:
        """The adapter that was loaded under exactly this name."""
        return self._by_name.get(name)

    def is_operators(self, name: str) -> bool:
        """Whether the server started with an adapter of this name. The name stays the operator's when it is gone."""
        return name in self._operator_names

    def forget(self, name: str) -> Adapter:
        """Forget a name; raises AdapterError if it is not known."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            listed = ", ".join(sorted(self._by_name)) or "none"
            raise AdapterError(f"No adapter named '{name}' is loaded; loaded are: {listed}.")
        self._lost.pop(adapter.adapter_id, None)
        return adapter

    def lose(self, adapter: Adapter, reason: str) -> None:
        """Keep a name, or bring it back, whose adapter cannot be served."""
        self._by_name.setdefault(adapter.name, adapter)
        self._lost[adapter.adapter_id] = reason

    def recover(self, adapter_id: AdapterId) -> None:
        """A later engine could read the adapter."""
        self._lost.pop(adapter_id, None)

    def loss_of(self, name: str) -> str | None:
        """Why the adapter of a name is lost; None if it is not."""
        adapter = self._by_name.get(name)
        return self._lost.get(adapter.adapter_id) if adapter else None

    def discard(self, adapter_id: AdapterId) -> None:
        """Forget the name that has this id, if there is one."""
        self._by_name = {name: one for name, one in self._by_name.items() if one.adapter_id != adapter_id}

    def by_id(self, adapter_id: AdapterId) -> Adapter | None:
        """The adapter that has this id now; searches all names."""
        return next((one for one in self._by_name.values() if one.adapter_id == adapter_id), None)

    def name_of(self, adapter_id: AdapterId) -> str | None:
        """The name that means this id now; searches all names."""
        return next((one.name for one in (self.base, *self._by_name.values()) if one.adapter_id == adapter_id), None)

    def get(self, model: str | None) -> Adapter | None:
        """As `find`, but None for an unknown name."""
        if model is None or model == self.base.name:
            return self.base
        return self._by_name.get(model.removeprefix(self._prefix))

    def find(self, model: str | None) -> Adapter:
        """The base model for None or its name; an adapter for its name or `base:adapter`.

        An unknown name is refused, never served by the base model.
        """
        adapter = self.get(model)
        if adapter is None:
            listed = ", ".join([self.base.name, *sorted(self._by_name)])
            message = f"There is no model or adapter named '{model}'; known are: {listed}."
            raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "model"))
        self.refuse_lost(adapter)
        return adapter

    def refuse_lost(self, adapter: Adapter, param: str = "model") -> None:
        """Raises ADAPTER_FAILED with the reason if an adapter is lost."""
        if reason := self._lost.get(adapter.adapter_id):
            message = (
                f"Adapter '{adapter.name}' could not be read: {reason} Load it again under this name, or unload it."
            )
            raise RequestError(Fault(FaultCode.ADAPTER_FAILED, message, param))
