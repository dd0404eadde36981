"""What a client sends to renew an adapter, and what it gets back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from rota.core.errors import RequestError
from rota.server.fields import Fields, read_body
from rota.server.terms import Mode, Terms
from rota.server.versions.upload import parse_config


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


class VersionBody(BaseModel):
    """One version: what it is, and what it takes in host memory once it was read."""

    version: int
    # current, staged, kept, leaving, lost.
    state: str
    # The folder for operators, the name for other keys; null for weights that came in a body.
    path: str | None
    bytes: int | None
    loaded_at: float | None


class PastBody(BaseModel):
    """A version that left."""

    version: int
    bytes: int | None
    loaded_at: float
    gone_at: float


class AdapterBody(BaseModel):
    """A name, what it means, its versions that are there, and the last ones that left."""

    name: str
    version: int
    owner: str | None
    pinned: bool
    versions: list[VersionBody]
    history: list[PastBody]


class AdaptersListBody(BaseModel):
    """The adapters that a key may use."""

    object: str
    data: list[AdapterBody]


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
