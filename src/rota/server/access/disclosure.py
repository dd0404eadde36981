"""Disclosure decides what a client learns about the machine: only an operator sees paths, and no client a spool's."""

from __future__ import annotations

import re
from dataclasses import replace

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode
from rota.runtime.spool import FOLDER
from rota.server.access.keys import Key

# The engine's own words may hold paths, and names of other tenants' adapters.
FOR_OTHERS = {
    FaultCode.ADAPTER_FAILED: "The adapter could not be loaded for this request; the server's log says why.",
    FaultCode.SOURCE_AWAY: "The source of the adapter is away; send the request again later.",
    FaultCode.DISK_FULL: "The server's disk has no room for the adapter; send the request again later.",
    FaultCode.DISK_FAILED: "The server's disk cannot take the adapter; send the request again later.",
    FaultCode.ENGINE_DIED: "The engine is down, or was started again; send the request again later.",
}
# An absolute path, but no slash in the middle of a word.
_ABSOLUTE = re.compile(r"(?<![^\s'\"(=])/[^\s'\")]+")
# A file of weights that came in a body, and the folder that has it, on whatever machine an engine has read it.
_BODYS_FILE = re.compile(rf"[^\s'\"(=]*{FOLDER}\w+/")
_BODY = re.compile(rf"[^\s'\"(=]*{FOLDER}\w+")


def path_for(key: Key, model: Adapter) -> str:
    """Where a model lies. A key that does not operate gets the model's name."""
    return model.path if key.may_operate else model.name


def fault_for(key: Key | None, fault: Fault) -> Fault:
    """A fault that came from the engine, as the key may see it. None: a client without a key."""
    if (key and key.may_operate) or fault.code not in FOR_OTHERS:
        return replace(fault, message=_without_bodies(fault.message))
    return replace(fault, message=FOR_OTHERS[fault.code])


def reason_for(key: Key | None, reason: str) -> str:
    """Why something failed. A key reads paths within its own root, and no absolute path. None: as in `fault_for`."""
    reason = _without_bodies(reason)
    return reason if key and key.may_operate else _ABSOLUTE.sub("(a path)", reason)


def _without_bodies(text: str) -> str:
    """No client has ever heard of the folder that a body was written to."""
    return _BODY.sub(lambda at: "the body" if at.start() else "The body", _BODYS_FILE.sub("", text))
