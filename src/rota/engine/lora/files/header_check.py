"""A header check says whether a model can serve an adapter, from its config and headers alone."""

from __future__ import annotations

from functools import partial

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError
from rota.core.extras import Extra
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.checks import SlotKind, refusals
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.folder_files import FolderFiles
from rota.engine.lora.files.outline import Ask, answer
from rota.engine.lora.files.reader import reason_for
from rota.engine.lora.growth import Growth
from rota.engine.model.spec import ModelSpec


class HeaderCheck:
    """From any thread. Weights are not read, so values that are not finite are found later.

    Adapters of one recipe have the same config and the same headers, to the byte: such a header is checked once. A
    check takes some milliseconds, and to find that it was made before takes a third of one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_rank: int,
        brought: Brought | None = None,
        extras: Extra = Extra.NONE,
        ranks: int = 1,
        matrices: int = 0,
        matrix_bytes: int = 0,
        growth: Growth | None = None,
        ask: Ask = answer,
    ) -> None:
        self._ask = ask
        self._spec, self._brought = spec, brought or Brought()
        self._slots = SlotKind(max_rank, extras, ranks, matrices, matrix_bytes, growth)
        self._passed: set[bytes] = set()

    def __call__(self, adapter: Adapter) -> str:
        """Why the model cannot serve the adapter, in a sentence; empty if nothing speaks against it. Blocks."""
        try:
            self.refuse(adapter)
        except Exception as error:  # whatever is wrong with its files, it is this adapter's alone
            return reason_for(adapter, error)
        return ""

    def refuse(self, adapter: Adapter) -> None:
        """Raises AdapterError if the model cannot serve the adapter. Of one in a source only headers are fetched."""
        ask = partial(self._ask, key=adapter.owner or "")
        with self._brought.outline(adapter) as place, FolderFiles(*place, ask) as files:
            if reason := self._refusal(files):
                raise AdapterError(reason)

    def _refusal(self, files: FolderFiles) -> str:
        if files.fingerprint in self._passed:
            return ""
        reason = next(refusals(AdapterFolder(files, self._spec.layers), self._spec, self._slots), "")
        if not reason:
            self._passed.add(files.fingerprint)
        return reason
