"""Updates bring new versions from folders and bodies to the adapter manager, for the keys that may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi import Request

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry
from rota.runtime.spool import Spool
from rota.server.access.access import Access
from rota.server.access.disclosure import reason_for
from rota.server.access.keys import Key
from rota.server.adapter_names import check_name
from rota.server.adapters import AdapterManager, Mode, Terms
from rota.server.audit import audited
from rota.server.versions.fields import UpdateFields, UploadFields
from rota.server.versions.tensors import read_tensors, write_tensors
from rota.server.versions.upload import Uploads


class Updates:
    """Every update has its line in the audit log, also one that is refused or fails."""

    def __init__(self, adapters: AdapterManager, registry: Registry, access: Access, spool: Spool) -> None:
        self._adapters = adapters
        self._registry = registry
        self._access = access
        self._spool = spool
        self._uploads = Uploads(spool)
        adapters.on_new, adapters.on_gone = self._keep_files, spool.drop

    async def from_fields(self, http: Request, name: str, fields: UpdateFields) -> Adapter:
        """A new version from a folder, or a version that is there."""
        key, terms = self._access.key_of(http), fields.terms
        if fields.version is not None:
            return await self._use(http, key, name, fields.version, terms)
        return await self.from_folder(http, name, fields.path or "", fields.pinned, terms)

    async def from_folder(
        self, http: Request, name: str, path: str, pinned: bool | None, terms: Terms, param: str = "path"
    ) -> Adapter:
        """A new version from a folder. Raises AdapterError with a reason that the key may read."""
        key = self._access.key_of(http)
        with _told_to(key), audited(http, key, "update", adapter=name, path=path) as details:
            self._check(http, name, pinned)
            self._access.refuse_loads(key, param)
            asked = self._asked(key, name, path, key.adapter_root, pinned, terms)
            adapter = await self._adapters.update(asked, terms)
            details["version"] = adapter.version
            return adapter

    async def from_body(self, http: Request, name: str, fields: UploadFields) -> Adapter:
        """A new version whose weights are the request's body."""
        key, terms, config = self._access.key_of(http), fields.terms, fields.peft_config
        with _told_to(key), audited(http, key, "update", adapter=name, path="(body)") as details:
            self._check(http, name, fields.pinned)
            async with self._uploads.folder() as folder:
                details["bytes"] = await self._uploads.receive(http, folder, config)
                adapter = await self._take(key, name, folder, fields.pinned, terms)
                details["version"] = adapter.version
                return adapter

    async def from_tensors(self, http: Request) -> Adapter:
        """A new version whose weights are a field of the body, as SGLang sends them."""
        key = self._access.key_of(http)
        with _told_to(key):
            return await self._from_tensors(http, key)

    async def _from_tensors(self, http: Request, key: Key) -> Adapter:
        async with self._uploads.folder() as folder:
            fields, text = await self._uploads.read(http, folder, read_tensors)
            fields.refuse_unsupported()
            with audited(http, key, "update", adapter=fields.lora_name, path="(body)") as details:
                self._check(http, fields.lora_name, fields.pinned)
                details["bytes"] = await self._uploads.run(write_tensors, folder, text, fields.config_dict)
                adapter = await self._take(key, fields.lora_name, folder, fields.pinned, Terms())
                details["version"] = adapter.version
                return adapter

    async def remove(self, adapter: Adapter, is_whole: bool) -> bool:
        """Unload a name, or one version of it. False: answers that run outlast the wait."""
        if is_whole:
            return await self._adapters.unload(adapter.name)
        return await self._adapters.unload_version(adapter)

    def _keep_files(self, adapter: Adapter) -> None:
        if adapter.root is not None and self._spool.is_root(adapter.root):
            self._spool.keep(adapter.adapter_id, Path(adapter.path))

    def _check(self, http: Request, name: str, pinned: bool | None) -> None:
        """Before the body is read: a client that may not is not waited for."""
        self._access.loader_of(http, name)
        if pinned:
            self._access.operator_of(http, "pinned")  # a pinned slot is lost to all other keys
        check_name(name)
        if self._registry.loaded(name) is None:
            self._registry.refuse_name(name)

    async def _take(self, key: Key, name: str, folder: Path, pinned: bool | None, terms: Terms) -> Adapter:
        asked = self._asked(key, name, str(folder), str(self._spool.root), pinned, terms)
        return await self._adapters.update(asked, terms)

    def _asked(self, key: Key, name: str, path: str, root: str | None, pinned: bool | None, terms: Terms) -> LoraPath:
        """A new version has its name's owner, weight and pin. A staged one is not pinned: two could fill all slots."""
        old = self._registry.loaded(name)
        is_pinned = bool(old and old.is_pinned) if pinned is None else pinned
        if is_pinned and (terms.mode is Mode.STAGE or terms.keeps_old):
            raise RequestError.bad_field("pinned", "Of a pinned adapter only one version stays: give pinned false.")
        return LoraPath(
            name=name,
            path=path,
            is_pinned=is_pinned,
            weight=old.weight if old else 1.0,
            root=root,
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
            await self._adapters.use(found, terms)
            return found


@contextmanager
def _told_to(key: Key) -> Iterator[None]:
    """Raises AdapterError with a reason that the key may read."""
    try:
        yield
    except AdapterError as error:
        raise error.reworded(reason_for(key, str(error))) from None
