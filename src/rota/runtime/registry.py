"""The registry knows adapters by name: what clients ask for, and which id that name has now."""

from __future__ import annotations

from itertools import count

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath


class Registry:
    """A name loaded again gets a new id, so KV of the old weights is never taken for the new ones'."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._by_name: dict[str, Adapter] = {}

    @property
    def adapters(self) -> list[Adapter]:
        """By name, in the order they were added."""
        return list(self._by_name.values())

    def add(self, asked: LoraPath) -> Adapter:
        """Give a name an id. It counts from now on; `forget` it if the adapter turns out to be bad."""
        if asked.name in self._by_name:
            raise AdapterError(
                f"An adapter named '{asked.name}' is already loaded; unload it first, or take another name."
            )
        adapter = Adapter(AdapterId(next(self._ids)), asked.name, asked.path, asked.weight, asked.is_pinned)
        self._by_name[asked.name] = adapter
        return adapter

    def forget(self, name: str) -> Adapter:
        """From now on the name is unknown."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise AdapterError(f"No adapter named '{name}' is loaded; known are {self._known()}.")
        return adapter

    def find(self, name: str) -> Adapter:
        """The adapter a client asks for; an unknown name is refused, never served by the base model."""
        adapter = self._by_name.get(name)
        if adapter is None:
            message = f"No adapter named '{name}' is loaded; known are {self._known()}."
            raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "model"))
        return adapter

    def _known(self) -> str:
        return ", ".join(sorted(self._by_name)) or "none"
