from __future__ import annotations

from rota.core.events import SlotChanged, SlotState
from rota.core.ids import AdapterId, EngineId, Slot
from rota.sim.plot import Tenures


def changed(at: float, adapter: int, state: SlotState, slot: int = 0, engine: int = 0) -> SlotChanged:
    return SlotChanged(at=at, slot=Slot(slot), adapter_id=AdapterId(adapter), state=state, engine_id=EngineId(engine))


def test_a_tenure_lasts_from_arrival_to_departure_and_its_copy_comes_before():
    tenures = Tenures()
    tenures.observe(
        [changed(1.0, 7, SlotState.LOADING), changed(1.5, 7, SlotState.READY), changed(4.0, 7, SlotState.EMPTY)]
    )

    assert tenures.closed == [(changed(1.0, 7, SlotState.LOADING), 1.5), (changed(1.5, 7, SlotState.READY), 4.0)]


def test_whoever_sits_at_the_end_sat_until_the_end():
    tenures = Tenures()
    tenures.observe([changed(1.0, 7, SlotState.READY), changed(3.0, 8, SlotState.READY, slot=1)])
    tenures.close()

    assert tenures.closed == [(changed(1.0, 7, SlotState.READY), 3.0)]


def test_the_same_slot_of_two_engines_is_two_places():
    tenures = Tenures()
    tenures.observe([changed(1.0, 7, SlotState.READY), changed(2.0, 8, SlotState.READY, engine=1)])
    tenures.observe([changed(3.0, 8, SlotState.EMPTY, engine=1)])
    tenures.close()

    assert [(begun.engine_id, begun.adapter_id, until) for begun, until in tenures.closed] == [(1, 8, 3.0), (0, 7, 3.0)]
