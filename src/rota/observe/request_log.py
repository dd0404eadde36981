"""The request log has a line for each request, written at its end, and for each trouble of an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from rota.core.events import EngineRestarted, Event, Finished
from rota.core.ids import RequestId
from rota.core.standstill import StoodStill, WentOn
from rota.observe.journey import Journey
from rota.observe.slot_pressure import SlotShortage

LOG = logging.getLogger("rota.requests")
ENGINE_LOG = logging.getLogger("rota.engine")


def log_end(request_id: RequestId, journey: Journey, ending: Finished) -> None:
    if not LOG.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "id": request_id,
        "call": journey.call,
        "key": journey.owner,
        "adapter": journey.label,
        "prompt_tokens": ending.prompt_tokens,
        "cached_tokens": ending.cached_tokens,
        "output_tokens": journey.tokens,
        "finish": ending.reason.value,
        "e2e_s": _since(journey, ending.at),
    }
    if journey.admitted_at is not None:
        fields["queue_wait_s"] = _since(journey, journey.admitted_at)
    if journey.reasons:
        fields["waited_for"] = list(journey.reasons)
    if journey.first_at is not None:
        fields["ttft_s"] = _since(journey, journey.first_at)
    if ending.fault:
        fields["fault"] = ending.fault.code.value
        fields["why"] = ending.fault.message
    LOG.info("request", extra={"fields": fields})


def log_engines(events: Iterable[Event]) -> None:
    for event in events:
        if isinstance(event, EngineRestarted):
            fields = {"engine": event.engine_id, "why": event.reason}
            ENGINE_LOG.warning("The engine died and is started again.", extra={"fields": fields})
        elif isinstance(event, StoodStill):
            _log_standstill(event)
        elif isinstance(event, WentOn):
            fields = {"engine": event.engine_id, "seconds": round(event.still_s, 3)}
            ENGINE_LOG.warning("The engine no longer stands still.", extra={"fields": fields})


def _log_standstill(event: StoodStill) -> None:
    fields: dict[str, Any] = {
        "engine": event.engine_id,
        "seconds": round(event.still_s, 3),
        "requests": event.requests,
        "reasons": [f"{request_id}: {reason}" for request_id, reason in event.reasons],
    }
    if event.is_stuck:
        ENGINE_LOG.error("The engine is stuck: nothing is under way for its requests.", extra={"fields": fields})
    else:
        fields["waits_for"] = event.waits_for
        ENGINE_LOG.warning("The engine stands still: its requests wait.", extra={"fields": fields})


def log_shortage(shortage: SlotShortage) -> None:
    fields = {
        "engine": shortage.engine_id,
        "busy": round(shortage.busy, 1),
        "slots": shortage.slots,
        "wait_s": round(shortage.wait_s, 3),
        "slot_bytes": shortage.slot_bytes,
    }
    ENGINE_LOG.warning("More adapters are busy than there are slots.", extra={"fields": fields})


def _since(journey: Journey, at: float) -> float:
    return round(at - journey.asked_at, 6)
