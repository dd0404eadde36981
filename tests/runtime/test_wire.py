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
    Preempted,
    PrefillsReleased,
    Produced,
    PromptsScored,
    SlotChanged,
    SlotReason,
    SlotState,
    Whereabouts,
)
from rota.core.ids import EngineId
from rota.core.messages import AbortAll, Explain, FlushCache, Inspect
from rota.core.plan import TokenLogprobs
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
    Stop(),
    Ready(capacity()),
    Failed("It broke."),
    Admitted("a", 1.0, 16),
    Preempted("a", 2.0),
    Produced(3.0, ("a", "b"), (5, 6), ((1, TokenLogprobs(-0.5, ((6, -0.5), (9, -2.25)))),)),
    PromptsScored(3.0, ("a", "b"), ((TokenLogprobs(-0.5, ((6, -0.5),)), TokenLogprobs(-1.5, ())), ())),
    SlotChanged(3.0, 0, 1, SlotState.LOADING, SlotReason.TURN_COME, engine_id=EngineId(2)),
    DrainChanged(3.0, 1, 2, DrainState.CALLED_OFF, engine_id=EngineId(2)),
    PrefillsReleased(3.0, "wait_success", 4, 0.25),
    Explained("a", 3.0, Whereabouts.WAITING, "why", 1.0, 2),
    Inspected(3.0, 7, 2, 64, 9, 3, (AdapterStanding(1, 2, 0, 1, None, ""), AdapterStanding(2, 1, 0, 0, 0.5, "why"))),
    CacheFlushed(3.0, 5),
    EngineRestarted(3.0, "It was killed.", engine_id=EngineId(2)),
    Finished("a", 4.0, FinishReason.FAILED, 3, 2, 1, Fault(FaultCode.QUEUE_FULL, "Full.", "n")),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_out_as_it_went_in(record):
    assert decode(encode([record])) == [record]


def test_a_batch_keeps_its_order():
    assert decode(encode(RECORDS)) == RECORDS
