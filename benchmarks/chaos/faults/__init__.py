"""Every fault of a chaos run, by its name."""

from __future__ import annotations

from . import clients, disk, ends, folders, rights
from .fault import Ends, Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault for module in (ends, disk, folders, clients, rights) for fault in module.FAULTS
}

__all__ = ["FAULTS", "Ends", "Fault"]
