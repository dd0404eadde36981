"""The registry knows what clients may ask for by name, and which id that name has now."""

from __future__ import annotations

from itertools import count

from rota.core.adapter import BASE_LABEL, OTHER_LABEL, Adapter
from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.ids import BASE, AdapterId
from rota.core.lora_paths import LoraPath


class Registry:
    """The base model and its adapters.

    A name loaded again gets a new id, so KV of the old weights is never taken for the new ones'. An adapter counts
    from `add` on: who asks for it while it is being read waits for it.
    """

    def __init__(self, base_name: str, base_path: str) -> None:
        self.base = Adapter(adapter_id=BASE, name=base_name, path=base_path)
        self._ids = count(BASE + 1)
        self._by_name: dict[str, Adapter] = {}
        self._prefix = f"{base_name}:"

    @property
    def adapters(self) -> list[Adapter]:
        """In the order they were added."""
        return list(self._by_name.values())

    def has(self, adapter: Adapter) -> bool:
        """Whether its name still means this adapter, and not none or one that was loaded later."""
        return self._by_name.get(adapter.name) == adapter

    def add(self, asked: LoraPath) -> Adapter:
        """Give a name an id; `forget` it if the adapter turns out to be bad."""
        if not asked.name.strip():
            raise AdapterError("An adapter needs a name that is not empty.")
        if asked.name == self.base.name:
            raise AdapterError(f"'{asked.name}' is the base model's name; take another for this adapter.")
        if asked.name in (BASE_LABEL, OTHER_LABEL):
            raise AdapterError(
                f"An adapter cannot be called '{asked.name}': metrics and logs have that word for something else; take "
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
        )
        self._by_name[asked.name] = adapter
        return adapter

    def forget(self, name: str) -> Adapter:
        """From now on the name is unknown."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            listed = ", ".join(sorted(self._by_name)) or "none"
            raise AdapterError(f"No adapter named '{name}' is loaded; loaded are: {listed}.")
        return adapter

    def discard(self, adapter_id: AdapterId) -> None:
        """Forget the name that has this id, if one still has."""
        self._by_name = {name: one for name, one in self._by_name.items() if one.adapter_id != adapter_id}

    def name_of(self, adapter_id: AdapterId) -> str | None:
        """The name that means this id now; looks through all of them."""
        return next((one.name for one in (self.base, *self._by_name.values()) if one.adapter_id == adapter_id), None)

    def get(self, model: str | None) -> Adapter | None:
        """As `find`, but None for an unknown name."""
        if model is None or model == self.base.name:
            return self.base
        return self._by_name.get(model.removeprefix(self._prefix))

    def find(self, model: str | None) -> Adapter:
        """Whom a client asks for: the base model, also by None; an adapter's name; or `base:adapter`.

        An unknown name is refused, never served by the base model.
        """
        adapter = self.get(model)
        if adapter is None:
            listed = ", ".join([self.base.name, *sorted(self._by_name)])
            message = f"There is no model or adapter named '{model}'; known are: {listed}."
            raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "model"))
        return adapter
