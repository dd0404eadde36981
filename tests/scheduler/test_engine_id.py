from __future__ import annotations

from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    CacheFlushed,
    DrainChanged,
    HostChanged,
    Inspected,
    PrefillsReleased,
    Produced,
    SlotChanged,
)
from rota.core.ids import EngineId
from rota.core.messages import FlushCache, Inspect
from rota.core.policy_config import PolicyConfig
from tests.builders import add_adapter
from tests.scheduler.stage import Stage

OF_AN_ENGINE = (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    CacheFlushed,
    DrainChanged,
    HostChanged,
    Inspected,
    PrefillsReleased,
    Produced,
    SlotChanged,
)


def test_every_event_that_is_not_of_one_request_says_which_engine_it_is_of():
    policy = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=1.0, enable_prefill_delayer=True)
    stage = Stage(adapters=2, slots=1, policy=policy, engine_id=EngineId(3))
    stage.seat(1)
    stage.ask("starves", adapter=2)
    stage.step(at=5.0)
    stage.tell(Inspect(stage.now))
    stage.tell(FlushCache(stage.now))
    stage.tell(add_adapter(1))  # its id is taken
    stage.unload(1, is_forced=True)
    stage.step()

    told = {type(event): event.engine_id for event in stage.events if isinstance(event, OF_AN_ENGINE)}
    assert told == dict.fromkeys(OF_AN_ENGINE, EngineId(3))
