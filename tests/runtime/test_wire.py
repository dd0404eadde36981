from __future__ import annotations

import pytest

from rota.core.errors import Fault, FaultCode
from rota.core.events import (
    AdapterStanding,
    Admitted,
    CacheFlushed,
    DrainChanged,
    DrainState,
    EngineRestarted,
    Explained,
    Finished,
    FinishReason,
    Inspected,
    Moved,
    Preempted,
    PrefillsReleased,
    Produced,
    PromptsScored,
    SlotChanged,
    SlotReason,
    SlotState,
    Whereabouts,
)
from rota.core.ids import AdapterId, EngineId, Slot
from rota.core.messages import AbortAll, AdapterFetched, Explain, FlushCache, Inspect, MoveRequests, SealAdapter
from rota.core.plan import Load, StepPlan, TokenLogprobs
from rota.core.standstill import StoodStill, WentOn
from rota.runtime.ranks.meeting import CODEC, Numbered
from rota.runtime.wire import Failed, Ready, Stop, decode, encode
from tests.builders import abort, capacity, submit

RECORDS = [
    submit("a", prompt=9, temperature=0.5, top_k=3, stop=("é", "\n"), stop_token_ids=frozenset({2}), seed=2**62),
    submit("a", logprobs=0, prompt_logprobs=5),
    abort("a", at=1.5),
    AbortAll(2.5),
    Explain("a", 1.0),
    Inspect(1.0),
    FlushCache(1.0),
    MoveRequests(old=AdapterId(1), new=AdapterId(2), at=1.0, keeps_kv=True),
    Stop(),
    Ready(capacity(pages=40)),
    AdapterFetched(adapter_id=AdapterId(1), at=1.0, pages=8, matrices=2, seals=("a", "b")),
    SealAdapter(AdapterId(1), 1.0, ("a", "b")),
    Failed("It broke."),
    Admitted(request_id="a", at=1.0, cached_tokens=16),
    Preempted("a", 2.0),
    Moved(request_id="a", at=2.0, old=1, new=2, old_version=3, new_version=4, output_tokens=7, kept_kv=True),
    Produced(
        at=3.0, request_ids=("a", "b"), tokens=(5, 6), logprobs=((1, TokenLogprobs(-0.5, ((6, -0.5), (9, -2.25)))),)
    ),
    PromptsScored(3.0, ("a", "b"), ((TokenLogprobs(-0.5, ((6, -0.5),)), TokenLogprobs(-1.5, ())), ())),
    SlotChanged(
        at=3.0, slot=0, adapter_id=1, state=SlotState.LOADING, reason=SlotReason.TURN_COME, engine_id=EngineId(2)
    ),
    DrainChanged(at=3.0, victim=1, beneficiary=2, state=DrainState.CALLED_OFF, engine_id=EngineId(2)),
    PrefillsReleased(at=3.0, reason="wait_success", passes=4, waited_s=0.25),
    Explained(request_id="a", at=3.0, state=Whereabouts.WAITING, reason="why", since=1.0, position=2),
    Inspected(
        at=3.0,
        steps=7,
        rows=2,
        blocks=64,
        blocks_used=9,
        slots=3,
        pages=12,
        pages_used=5,
        adapters=(
            AdapterStanding(adapter_id=1, waiting=2, running=0, parked=1, oldest_at=None, reason=""),
            AdapterStanding(adapter_id=2, waiting=1, running=0, parked=0, oldest_at=0.5, reason="why"),
        ),
    ),
    CacheFlushed(3.0, 5),
    EngineRestarted(at=3.0, reason="It was killed.", engine_id=EngineId(2)),
    StoodStill(at=13.0, since=3.0, requests=2, reasons=(("a", "why"),), waits_for="a read", engine_id=EngineId(2)),
    WentOn(14.0, 11.0, engine_id=EngineId(2)),
    Finished(
        request_id="a",
        at=4.0,
        reason=FinishReason.FAILED,
        prompt_tokens=3,
        output_tokens=2,
        cached_tokens=1,
        fault=Fault(FaultCode.QUEUE_FULL, "Full.", "n"),
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_out_as_it_went_in(record):
    assert decode(encode([record])) == [record]


def test_a_batch_keeps_its_order():
    assert decode(encode(RECORDS)) == RECORDS


def test_a_plan_for_another_rank_keeps_the_pages_of_its_loads():
    plan = StepPlan(step_id=1, loads=(Load(adapter_id=AdapterId(1), slot=Slot(0), pages=(3, 0, 7)),))
    assert CODEC.decode(CODEC.encode([Numbered(1, plan)])) == [Numbered(1, plan)]
