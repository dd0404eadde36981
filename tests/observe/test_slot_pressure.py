"""Slots that are too few are told of: when they begin to be, while they are, and no longer than that."""

from __future__ import annotations

import pytest

from rota.core.events import EngineRestarted, Event, Finished, FinishReason, Moved, Routed, SlotChanged, SlotState
from rota.core.ids import BASE, FIRST_ENGINE, AdapterId, EngineId, RequestId
from rota.observe.slot_pressure import TELL_EVERY_S, WINDOW_S, SlotPressure, SlotShortage
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import Client, Scenario

SLOTS, BYTES = 2, 84_000_000


def changed(adapter: int, state: SlotState, at: float, engine: int = FIRST_ENGINE) -> SlotChanged:
    return SlotChanged(at=at, slot=0, adapter_id=AdapterId(adapter), state=state, engine_id=EngineId(engine))


def ended(request: str, at: float) -> Finished:
    return Finished(request_id=RequestId(request), at=at, reason=FinishReason.STOP)


class Scene:
    """Four adapters with a request each; two are in the slots, and `turn` changes places."""

    def __init__(self, adapters: int = 4, slots: int = SLOTS) -> None:
        self.told: list[SlotShortage] = []
        self.pressure = SlotPressure(lambda _: (slots, BYTES), self.told.append)
        self.now = 0.0
        for adapter in range(1, adapters + 1):
            self.pressure.asked(RequestId(f"r{adapter}"), AdapterId(adapter), 0.0)
        self.inside, self.outside = [*range(1, slots + 1)], [*range(slots + 1, adapters + 1)]
        self.hear(*(changed(one, SlotState.READY, 0.0) for one in self.inside))

    def hear(self, *events: Event) -> None:
        self.pressure.observe(events)

    def turn(self) -> None:
        leaves, comes = self.inside.pop(0), self.outside.pop(0)
        self.hear(changed(leaves, SlotState.EMPTY, self.now), changed(comes, SlotState.READY, self.now))
        self.inside.append(comes)
        self.outside.append(leaves)

    def last(self, windows: float, turn_s: float) -> SlotShortage | None:
        """Adapters take turns of this length for so many windows; gives what is short then."""
        end = self.now + windows * WINDOW_S
        while (self.now + turn_s) <= end:
            self.now += turn_s
            self.turn()
        self.now = end
        return self.short()

    def short(self, engine: int = FIRST_ENGINE) -> SlotShortage | None:
        return self.pressure.shortages(self.now).get(EngineId(engine))


def test_slots_are_short_once_adapters_have_waited_long_for_two_windows():
    scene = Scene()

    assert scene.last(windows=1, turn_s=1.25) is None
    short = scene.last(windows=1, turn_s=1.25)
    assert short is not None
    assert (short.busy, short.slots, short.wait_s) == (4.0, 2, pytest.approx(2.5))


def test_slots_that_adapters_wait_for_shortly_are_not_short():
    assert Scene().last(windows=6, turn_s=0.3) is None


def test_slots_as_many_as_adapters_are_not_short_however_long_a_copy_takes():
    scene = Scene(adapters=SLOTS)
    scene.hear(*(changed(one, SlotState.EMPTY, 0.0) for one in scene.inside))
    scene.now = 6 * WINDOW_S

    assert scene.short() is None


def test_a_warning_neither_ends_with_one_better_window_nor_returns_with_one_worse():
    scene = Scene()
    assert scene.last(windows=2, turn_s=1.25)

    assert scene.last(windows=2, turn_s=0.1), "too early to say"
    assert scene.last(windows=1, turn_s=1.25)
    assert scene.last(windows=6, turn_s=0.3), "not long enough to begin, and too long to end"
    assert scene.last(windows=2, turn_s=0.1)
    assert scene.last(windows=1, turn_s=0.1) is None
    assert scene.last(windows=1, turn_s=1.25) is None


def test_adapters_without_requests_end_a_warning():
    scene = Scene()
    assert scene.last(windows=2, turn_s=1.25)
    scene.hear(*(ended(f"r{one}", scene.now) for one in range(1, 5)))

    scene.now += 3 * WINDOW_S
    assert scene.short() is None


def test_adapters_that_stand_without_end_are_seen_though_no_slot_changes():
    scene = Scene()
    scene.now = 2 * WINDOW_S

    short = scene.short()
    assert short is not None
    assert short.wait_s == 2 * WINDOW_S


def test_a_shortage_is_told_once_in_ten_minutes():
    scene = Scene()
    scene.last(windows=TELL_EVERY_S / WINDOW_S + 1, turn_s=1.25)
    assert len(scene.told) == 1

    scene.last(windows=1, turn_s=1.25)
    assert len(scene.told) == 2


def test_requests_for_the_base_model_need_no_slot():
    pressure = SlotPressure(lambda _: (1, 0))
    for number in range(9):
        pressure.asked(RequestId(f"r{number}"), BASE, 0.0)
    pressure.observe([changed(1, SlotState.READY, 0.0)])

    assert pressure.shortages(9 * WINDOW_S) == {}


def test_each_replica_has_slots_of_its_own():
    scene = Scene()
    scene.hear(*(Routed(request_id=RequestId(f"r{one}"), at=0.0, reason="idle", engine_id=1) for one in (1, 2, 3, 4)))
    scene.now = 3 * WINDOW_S

    assert scene.short(FIRST_ENGINE) is None
    assert scene.short(EngineId(1)) is not None


def test_an_engine_that_restarts_has_nothing_in_its_slots():
    scene = Scene(adapters=3)
    scene.hear(EngineRestarted(at=0.0, reason="killed"))
    scene.now = 2 * WINDOW_S

    assert scene.short() is not None


def test_a_request_that_goes_on_under_a_new_version_makes_that_version_busy():
    scene = Scene(adapters=3)
    moved = Moved(
        request_id=RequestId("r3"), at=0.0, old=3, new=1, old_version=1, new_version=2, output_tokens=0, kept_kv=True
    )
    scene.hear(moved)
    scene.now = 3 * WINDOW_S

    assert scene.short() is None


def test_the_warning_says_how_many_wait_how_long_and_what_a_slot_costs():
    assert str(SlotShortage(FIRST_ENGINE, 61.3, 8, 2.43, BYTES)) == (
        "More adapters are busy than there are slots: 61 on 8. Of their waits for a slot, one in ten lasts longer than "
        "2.4 s; so long their answers pause or do not begin. One more slot (--max-loras-per-batch) takes 84 MB on the "
        "device."
    )


def worst(adapters: int, slots: int, rate: float) -> SlotShortage | None:
    """The worst shortage of a simulated run."""
    client = Client(requests=400, rate_per_s=rate, adapters=adapters, distribution="zipf", zipf_exponent=1.0)
    scenario = Scenario(name="zipf", slots=slots, kv_blocks=32_768, max_loaded_loras=adapters, clients=(client,))
    pressure = SlotPressure(lambda _: (slots, 0))
    Simulation(scenario=scenario, costs=read_cost("h200-llama8b"), observers=[pressure]).run()
    return pressure.worst


def test_500_adapters_are_too_many_for_8_slots():
    short = worst(adapters=500, slots=8, rate=12.0)

    assert short is not None
    assert short.busy > 20
    assert short.wait_s > 1.5


@pytest.mark.parametrize(("adapters", "slots", "rate"), [(500, 32, 12.0), (40, 40, 30.0)])
def test_nobody_is_warned_where_slots_are_enough(adapters, slots, rate):
    assert worst(adapters, slots, rate) is None
