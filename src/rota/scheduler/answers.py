"""Answers are the events for which clients wait, whatever the device does meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event, Finished

ANSWERS = (AdapterAdded, AdapterRefused, AdapterRemoved, Finished)


def has_answers(events: Iterable[Event]) -> bool:
    return any(isinstance(event, ANSWERS) for event in events)
