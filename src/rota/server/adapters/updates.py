"""Updates bring new versions from folders and bodies to the adapter manager, for the keys that may."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry
from rota.runtime.spool import Spool
from rota.server.access.access import Access
from rota.server.access.audit import audited
from rota.server.access.keys import Key
from rota.server.adapters.manager import AdapterManager, Mode, Terms, check_name
from rota.server.adapters.room import KeyRoom
from rota.server.adapters.upload import Uploads, parse_config, read_tensors, write_tensors
from rota.server.calls.fields import Fields, read_body

# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a client sends to renew an adapter, and what it gets back.


class TermsFields(Fields):
    """How the new version takes the place of the old one."""

    mode: Literal["finish", "switch", "stage"] | None = None
    kv: Literal["recompute", "keep"] | None = None
    keep_old: bool | None = None
    pinned: bool | None = None

    @property
    def terms(self) -> Terms:
        """Raises RequestError for terms that contradict each other."""
        mode = Mode(self.mode or Mode.FINISH)
        if self.keep_old and mode is Mode.STAGE:
            raise RequestError.bad_field("keep_old", "keep_old says nothing with mode 'stage': the old version stays.")
        if self.kv and mode is not Mode.SWITCH:
            message = "kv says what becomes of answers that are moved; it needs mode 'switch'."
            raise RequestError.bad_field("kv", message)
        return Terms(mode, bool(self.keep_old), self.kv == "keep")


class UpdateFields(TermsFields):
    """Where the new version lies, or which version that is there the name shall mean."""

    path: str | None = None
    version: int | None = None

    def check(self) -> None:
        """Raises RequestError unless it names one thing to serve."""
        if (self.path is None) == (self.version is None):
            raise RequestError.bad_field(
                "path", "Give either path, for a new version, or version, for one that is there."
            )
        if self.version is not None and self.mode == "stage":
            raise RequestError.bad_field(
                "mode", "mode 'stage' is for a new version; a version that is there needs none."
            )
        if self.version is not None and self.pinned is not None:
            raise RequestError.bad_field("pinned", "pinned is for a new version; one that is there keeps its own.")


class UploadFields(TermsFields):
    """The query of a body with weights."""

    config: str | None = None

    @property
    def peft_config(self) -> dict[str, Any] | None:
        return None if self.config is None else parse_config(self.config)


class UpdatedBody(BaseModel):
    """What the name means now, what it meant before, and which version was asked for."""

    name: str
    version: int
    previous: int | None
    current: int


class RemovedBody(BaseModel):
    """What was unloaded; not yet gone if answers still run."""

    name: str
    versions: list[int]
    is_gone: bool


def read_query(query: Mapping[str, str]) -> UploadFields:
    """The fields of a query, by the rules of a body. Raises RequestError with the name of a wrong one."""
    booleans = {"true": True, "false": False}
    typed = {name: value if name == "config" else booleans.get(value, value) for name, value in query.items()}
    return read_body(UploadFields, json.dumps(typed).encode())


# ── updates ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Updates:
    """Every update has its line in the audit log, also one that is refused or fails."""

    def __init__(self, adapters: AdapterManager, registry: Registry, access: Access, spool: Spool) -> None:
        self._adapters = adapters
        self._registry = registry
        self._access = access
        self._spool = spool
        self._room = KeyRoom(access.key_named, spool.free_bytes)
        self._uploads = Uploads(spool, self._room)
        adapters.on_new, adapters.on_gone = self._begin, self._end

    async def from_fields(self, http: Request, name: str, fields: UpdateFields) -> Adapter:
        """A new version from a folder, or a version that is there."""
        key, terms = self._access.key_of(http), fields.terms
        if fields.version is not None:
            return await self._use(http, key, name, fields.version, terms)
        return await self.from_folder(http, name, fields.path or "", fields.pinned, terms)

    async def from_folder(
        self, http: Request, name: str, path: str, pinned: bool | None, terms: Terms, param: str = "path"
    ) -> Adapter:
        """A new version from a folder. Raises AdapterError."""
        key = self._access.key_of(http)
        with audited(http, key, "update", adapter=name, path=path) as details:
            self._check(http, name, pinned)
            self._access.refuse_loads(key, param)
            asked = LoraPath(name=name, path=path, root=key.adapter_root)
            adapter = await self._adapters.update(asked, terms, partial(self._decide, http, pinned, terms))
            details["version"] = adapter.version
            return adapter

    async def from_body(self, http: Request, name: str, fields: UploadFields) -> Adapter:
        """A new version whose weights are the request's body."""
        key, terms, config = self._access.key_of(http), fields.terms, fields.peft_config
        with audited(http, key, "update", adapter=name, path="(body)") as details:
            self._check(http, name, fields.pinned)
            async with self._uploads.folder(key, http) as folder:
                details["bytes"] = size = await self._uploads.receive(key, http, folder, config)
                adapter = await self._take(http, name, folder, size, fields.pinned, terms)
                details["version"] = adapter.version
                return adapter

    async def from_tensors(self, http: Request) -> None:
        """A new version whose weights are a field of the body, as SGLang sends them."""
        key = self._access.key_of(http)
        self._access.refuse_loader(key)  # before the body, which says the name, is waited for
        async with self._uploads.folder(key, http) as folder:
            fields, text = await self._uploads.read(key, http, folder, read_tensors)
            fields.refuse_unsupported()
            with audited(http, key, "update", adapter=fields.lora_name, path="(body)") as details:
                self._check(http, fields.lora_name, fields.pinned)
                details["bytes"] = size = await self._uploads.run(write_tensors, folder, text, fields.config_dict)
                adapter = await self._take(http, fields.lora_name, folder, size, fields.pinned, Terms())
                details["version"] = adapter.version

    def _begin(self, adapter: Adapter, is_more: bool) -> None:
        if (key := self._access.key_named(adapter.owner or "")) and self._access.is_barred(key):
            self._access.refuse_loader(key)  # also what a request or a change of files brings about
        self._room.take(adapter, is_more)
        if adapter.root is not None and self._spool.is_root(adapter.root):
            self._spool.keep(adapter.adapter_id, Path(adapter.path))

    def _end(self, adapter_id: AdapterId) -> None:
        self._room.drop(adapter_id)
        self._spool.drop(adapter_id)

    def _check(self, http: Request, name: str, pinned: bool | None) -> Key:
        """Before the body is read: a client that may not is not waited for."""
        key = self._access.loader_of(http, name)
        if pinned:
            self._access.operator_of(http, "pinned")  # a pinned slot is lost to all other keys
        check_name(name)
        if self._registry.loaded(name) is None:
            self._registry.refuse_name(name)
            self._room.check_versions(key)
        return key

    async def _take(
        self, http: Request, name: str, folder: Path, size: int, pinned: bool | None, terms: Terms
    ) -> Adapter:
        asked = LoraPath(name=name, path=str(folder), root=str(self._spool.root), size_bytes=size)
        return await self._adapters.update(asked, terms, partial(self._decide, http, pinned, terms))

    def _decide(self, http: Request, pinned: bool | None, terms: Terms, asked: LoraPath) -> LoraPath:
        """Under the name's lock: other calls may have changed the name, and operators the key, since this one began.

        A new version has its name's owner, weight and pin. A staged one is not pinned: two could fill all slots.
        """
        key, old = self._check(http, asked.name, pinned), self._registry.loaded(asked.name)
        is_pinned = bool(old and old.is_pinned) if pinned is None else pinned
        if is_pinned and (terms.mode is Mode.STAGE or terms.keeps_old):
            raise RequestError.bad_field("pinned", "Of a pinned adapter only one version stays: give pinned false.")
        return replace(
            asked,
            is_pinned=is_pinned,
            weight=old.weight if old else 1.0,
            root=asked.root if self._spool.is_root(asked.root or "") else key.adapter_root,
            owner=old.owner if old else key.name,
        )

    async def _use(self, http: Request, key: Key, name: str, version: int, terms: Terms) -> Adapter:
        with audited(http, key, "update", adapter=name, version=version):
            self._access.loader_of(http, name)
            found = next((one for one in self._registry.versions(name) if one.version == version), None)
            if found is None:
                listed = ", ".join(str(one.version) for one in self._registry.versions(name)) or "none"
                message = f"There is no version {version} of '{name[:200]}'; there are: {listed}."
                raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, message, "version"))
            await self._adapters.use(found, terms, lambda: self._access.loader_of(http, name))
            return found
