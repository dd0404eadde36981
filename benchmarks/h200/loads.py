"""Loads: does a step take longer while an adapter is copied to the device beside it?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rota.core.events import Event

from .stage import load_spans, milliseconds, steady
from .timed import Step


def beside_loads(steps: Sequence[Step], events: Sequence[Event]) -> dict[str, Any]:
    """Steps that only decode in full number, those under way during a load and those that were not."""
    spans = load_spans(events)
    decoding = [step.decodes for step in steps if not step.prompt_tokens]
    full = steady(steps, statistics.mode(decoding)) if decoding else []
    beside = [step.seconds for step in full if _meets(step, spans)]
    apart = [step.seconds for step in full if not _meets(step, spans)]
    found: dict[str, Any] = {"loads": len(spans), "steps beside loads": len(beside), "other steps": len(apart)}
    if spans:
        found["load ms"] = milliseconds([end - begin for begin, end in spans])
    if beside and apart:
        found["step ms beside loads"], found["step ms otherwise"] = milliseconds(beside), milliseconds(apart)
        found["longest beside / median otherwise"] = round(max(beside) / statistics.median(apart), 3)
    return found


def _meets(step: Step, spans: Sequence[tuple[float, float]]) -> bool:
    return any(begin < step.ended_at and step.began_at < end for begin, end in spans)
