from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

import rota
from rota.dashboard.frame import DrainShown, Frame, Tenure
from rota.runtime.service import ServiceState

ROOMS = ("core", "policy", "scheduler", "sim", "workload")
MANY = 4


def records() -> Iterator[type]:
    """The dataclasses of some rooms that have many fields, and a few of other rooms."""
    yield from (DrainShown, Frame, ServiceState, Tenure)
    for room in ROOMS:
        for found in pkgutil.walk_packages([f"{rota.__path__[0]}/{room}"], f"rota.{room}."):
            module = importlib.import_module(found.name)
            for kind in vars(module).values():
                is_own = isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
                if is_own and sum(one.init for one in fields(kind)) >= MANY:
                    yield kind


@pytest.mark.parametrize("record", list(records()), ids=lambda record: record.__name__)
def test_a_record_with_many_fields_takes_keywords_only(record):
    assert [one.name for one in fields(record) if one.init and not one.kw_only] == []
