from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.config import SchedulerConfig
from rota.core.events import Admitted, DrainChanged, Finished, Preempted, SlotChanged, SlotState
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.scheduler.newcomers import MOST_OVERTAKES
from tests.builders import add_adapter, capacity, request, submit
from tests.fakes import FakeDevice
from tests.scheduler.stage import Stage, loads, seated
from tests.worlds import endings, serve

ROTATE = PolicyConfig(lora_policy="rotate")
DRAIN = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=3.0)
WAIT = PolicyConfig(lora_policy="wait")


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", [ROTATE, DRAIN, WAIT])
def test_a_request_whose_adapter_is_absent_never_blocks_those_behind_it(policy):
    stage = Stage(slots=1, policy=policy)
    stage.seat(1)
    stage.ask("cold", adapter=2)
    stage.ask("plain")
    stage.ask("warm", adapter=1)

    assert seated(stage.step()) == ["plain", "warm"]
    assert stage.why("cold") == "its adapter is not in a slot"


@pytest.mark.parametrize("policy", [ROTATE, DRAIN, WAIT])
def test_base_requests_never_wait_for_a_slot(policy):
    stage = Stage(slots=2, policy=policy)
    stage.seat(1, 2)
    for second in range(1, 20):
        stage.ask(f"cold{second}", adapter=3)
        stage.ask(f"plain{second}", max_new_tokens=1)
        assert f"plain{second}" in seated(stage.step(at=float(second)))


def test_base_requests_are_never_drained_for_an_adapter():
    stage = Stage(slots=1, policy=DRAIN)
    stage.seat(1, max_new_tokens=40)
    stage.ask("cold", adapter=2)
    stage.step(at=5.0)
    stage.ask("drains", adapter=1, max_new_tokens=480)
    stage.ask("plain", max_new_tokens=480)

    assert seated(stage.step()) == ["plain"]
    assert "makes room for another" in stage.why("drains")


# ── KV ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def crowded(**fields) -> Stage:
    """Sixty-four blocks of sixteen tokens, of which two long sequences hold fifty."""
    stage = Stage(adapters=0, rows=8, **fields)
    for id in ("long1", "long2"):
        stage.ask(id, prompt=399, max_new_tokens=100)
    assert seated(stage.step()) == ["long1", "long2"]
    return stage


def test_a_small_request_passes_one_that_has_no_kv_and_a_large_one_does_not():
    stage = crowded()
    stage.ask("large", prompt=390)
    stage.ask("equal", prompt=390)
    stage.ask("small", prompt=10)

    assert seated(stage.step()) == ["small"]
    assert stage.why("large") == stage.why("equal") == "its prompt does not fit into the KV blocks that are free"


def test_a_large_prompt_that_lies_in_the_cache_needs_little_and_passes():
    prompt = tuple(range(390))
    stage = Stage(adapters=0, rows=8)
    for id in ("long1", "long2"):
        stage.ask(id, prompt=prompt, max_new_tokens=100)
    stage.step()
    stage.ask("long3", prompt=400, max_new_tokens=100)
    stage.step()
    stage.ask("large", prompt=390)
    stage.ask("prefix known", prompt=prompt)

    assert seated(stage.step()) == ["prefix known"]


@pytest.mark.parametrize(("more", "starts"), [(16, ["asks"]), (17, [])])
def test_a_prompt_starts_with_the_last_blocks_that_are_free_if_others_hold_the_rest_of_it(more, starts):
    """Of twelve blocks nine are held, eight of these by the same text, and one is left for the sequence that runs."""
    text = tuple(range(3, 3 + 128))
    stage = Stage(adapters=0, blocks=12)
    stage.ask("runs", prompt=(*text, 1), max_new_tokens=10)
    stage.step()
    stage.ask("asks", prompt=(*text, 2, *range(150, 150 + 15 + more)), max_new_tokens=2)

    assert seated(stage.step()) == starts


@pytest.mark.parametrize(("blocks", "starts"), [(11, ["asks"]), (10, [])])
def test_a_prompt_starts_in_the_last_block_that_is_free_if_others_hold_all_but_its_end(blocks, starts):
    """Nine are held, eight of these by the same text, and one is left for the sequence that runs."""
    text = tuple(range(3, 3 + 128))
    stage = Stage(adapters=0, blocks=blocks)
    stage.ask("runs", prompt=(*text, 1), max_new_tokens=10)
    stage.step()
    stage.ask("asks", prompt=(*text, 2), max_new_tokens=2)

    assert seated(stage.step()) == starts


def test_one_that_waits_for_kv_is_overtaken_only_so_often():
    stage = crowded()
    stage.ask("large", prompt=390)
    overtakers = 0
    while not (places := seated(stage.step())) or places[0] != "large":
        overtakers += len(places)
        stage.ask(f"small{stage.now}", prompt=10, max_new_tokens=1)
        stage.now += 1.0
        assert overtakers <= MOST_OVERTAKES

    assert overtakers == MOST_OVERTAKES


@pytest.mark.parametrize("policy", [ROTATE, DRAIN, WAIT])
def test_nor_more_often_if_its_adapter_has_no_slot_because_it_waits_for_kv(policy):
    stage = Stage(adapters=2, slots=1, policy=policy, rows=8, blocks=80)
    stage.seat(1)
    for id in ("long1", "long2"):
        stage.ask(id, prompt=399, max_new_tokens=100)
    stage.step()
    stage.ask("large", adapter=2, prompt=480)
    overtakers = 0
    for number in range(MOST_OVERTAKES + 20):
        stage.now += 0.01
        stage.ask(f"small{number}", prompt=10, max_new_tokens=1)
        overtakers += len(seated(stage.step()))

    assert overtakers == MOST_OVERTAKES
    assert stage.why(f"small{MOST_OVERTAKES}") == "others that came first wait for KV"

    stage.leave("long1")
    plan = stage.step()
    assert seated(plan)  # there is KV for it now, and nobody else need wait
    stage.arrive(*loads(plan))
    stage.leave("runs1")
    while "large" not in seated(plan := stage.step()):
        stage.arrive(*loads(plan))
        stage.now += 1.0
        assert stage.now < 60.0


def test_a_line_that_lacks_kv_does_not_hold_a_slot_idle_for_one_it_does_not_let_pass():
    """Adapter 1 steps aside and holds the KV that nine others wait for. Were it kept out by adapter 2, whom the nine
    do not let pass, nobody would ever run again."""
    line = [(8.0, submit(f"large{number}", prompt=200, arrived_at=8.0)) for number in range(9)]
    events = serve(
        [
            (0.0, add_adapter(1)),
            (0.0, add_adapter(2)),
            (0.0, submit("holds", adapter=AdapterId(1), prompt=180, max_new_tokens=30)),
            *line,
            (9.0, submit("small", adapter=AdapterId(2), prompt=3, arrived_at=9.0)),
        ],
        FakeDevice(capacity(blocks=16, slots=1)),
        policy=ROTATE,
    )
    assert len(endings(events)) == 11


def test_nor_does_one_that_may_not_be_overtaken_any_more():
    seconds = [10.0 + number // 4 for number in range(MOST_OVERTAKES)]
    overtakers = [
        (at, submit(f"o{number}", prompt=3, max_new_tokens=1, arrived_at=at)) for number, at in enumerate(seconds)
    ]
    events = serve(
        [
            (0.0, add_adapter(1)),
            (0.0, add_adapter(2)),
            (0.0, submit("holds", adapter=AdapterId(1), prompt=180, max_new_tokens=60)),
            (9.0, submit("large", prompt=240, arrived_at=9.0)),
            *overtakers,
            (30.0, submit("small", adapter=AdapterId(2), prompt=3, arrived_at=30.0)),
        ],
        FakeDevice(capacity(blocks=24, slots=1)),
        policy=ROTATE,
    )
    assert len(endings(events)) == 3 + MOST_OVERTAKES


def test_one_that_was_preempted_keeps_its_first_arrival():
    stage = Stage(adapters=0, rows=4, blocks=8, block_size=16)
    stage.ask("old", prompt=46, max_new_tokens=60)
    stage.ask("young", at=1.0, prompt=46, max_new_tokens=60)
    stage.step(at=1.0)
    while not stage.said(Preempted):
        stage.step()
    waiting = stage.scheduler._state.base.queue.first()
    assert waiting is not None
    assert waiting.rest == len(waiting.tokens) > 46, "all of it is computed again"
    stage.ask("younger", at=2.0, prompt=46)
    stage.leave("old")

    assert seated(stage.step())[0] == "young"


# ── priority ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ask_with_priority(stage: Stage, id: str, priority: int, at: float, adapter: int = 0, **fields) -> None:
    asked = request(id, arrived_at=at, adapter=AdapterId(adapter), **fields)
    stage.tell(replace(asked, priority=priority))


@pytest.mark.parametrize(("came_at", "first"), [(9.0, "urgent"), (11.0, "patient")])
def test_priority_is_a_head_start_of_ten_seconds_and_no_more(came_at, first):
    stage = Stage(adapters=0, rows=1)
    ask_with_priority(stage, "patient", priority=0, at=0.0)
    ask_with_priority(stage, "urgent", priority=1, at=came_at)

    assert seated(stage.step(at=came_at)) == [first]


def test_the_urgent_of_a_cold_adapter_claim_a_slot_before_those_who_came_earlier():
    stage = Stage(adapters=3, slots=1, policy=ROTATE)
    stage.seat(1)
    ask_with_priority(stage, "patient", priority=0, at=1.0, adapter=2)
    ask_with_priority(stage, "urgent", priority=1, at=1.5, adapter=3)

    assert loads(stage.step(at=2.0)) == [3]


@pytest.mark.parametrize("policy", [WAIT, DRAIN], ids=lambda policy: policy.lora_policy)
def test_where_nobody_takes_turns_a_patient_resident_drains_at_once_for_the_urgent_of_a_cold_adapter(policy):
    """A stream of patient requests for adapter 1 would keep the slot for ever."""
    stage = Stage(adapters=2, slots=1, policy=policy)
    stage.seat(1, max_new_tokens=6)
    ask_with_priority(stage, "urgent", priority=1, at=0.0, adapter=2)
    ask_with_priority(stage, "patient", priority=0, at=0.0, adapter=1, max_new_tokens=400)

    while not stage.said(Finished):
        assert seated(stage.step(at=0.1)) == []
    assert "makes room for another" in stage.why("patient")
    assert loads(stage.step()) == [2]


@pytest.mark.parametrize("policy", [WAIT, DRAIN], ids=lambda policy: policy.lora_policy)
@pytest.mark.parametrize("patient", [1, 2])
def test_where_nobody_takes_turns_the_patient_resident_drains_and_not_the_urgent_one(policy, patient):
    stage = Stage(adapters=3, slots=2, policy=policy)
    for adapter in (1, 2):
        priority = 0 if adapter == patient else 1
        ask_with_priority(stage, f"runs{adapter}", priority, at=0.0, adapter=adapter, max_new_tokens=400)
    stage.step()
    stage.arrive(1, 2)
    stage.step()
    ask_with_priority(stage, "urgent", priority=1, at=0.0, adapter=3)
    stage.step(at=0.1)

    drains = [(event.victim, event.beneficiary) for event in stage.said(DrainChanged)]
    assert drains == [(patient, 3)]


def test_nobody_drains_under_wait_for_one_who_is_as_patient_as_all_others():
    stage = Stage(adapters=2, slots=1, policy=WAIT)
    stage.seat(1)
    stage.ask("asks", adapter=2)
    ask_with_priority(stage, "urgent, but needs no slot", priority=1, at=0.0)
    stage.step(at=1000.0)

    assert stage.said(DrainChanged) == []


@pytest.mark.parametrize("patient", [1, 2])
def test_a_slot_is_claimed_from_the_patient_and_not_from_the_urgent(patient):
    stage = Stage(adapters=3, slots=2, policy=ROTATE)
    for adapter in (1, 2):
        priority = 0 if adapter == patient else 1
        ask_with_priority(stage, f"runs{adapter}", priority, at=0.0, adapter=adapter, max_new_tokens=400)
    stage.step()
    stage.arrive(1, 2)
    stage.step(at=1.5)
    stage.ask("newcomer", adapter=3, max_new_tokens=400)
    assert loads(stage.step(at=2.0)) == [3]
    stage.arrive(3)
    stage.step()

    assert [event.adapter_id for event in stage.said(SlotChanged) if event.state is SlotState.EMPTY] == [patient]


def test_preemption_takes_from_the_patient_first():
    stage = Stage(adapters=0, rows=4, blocks=8, block_size=16)
    ask_with_priority(stage, "urgent", priority=1, at=1.0, prompt=46, max_new_tokens=60)
    ask_with_priority(stage, "patient", priority=0, at=0.0, prompt=46, max_new_tokens=60)
    while not (preempted := stage.said(Preempted)):
        stage.step(at=1.0)

    assert [event.request_id for event in preempted] == ["patient"]


# ── explanations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_waiting_request_says_why_and_since_when():
    stage = Stage(adapters=2, slots=1, rows=2)
    stage.seat(1)
    stage.ask("cold", adapter=2, at=0.0)
    stage.ask("sits", at=0.0)
    stage.step(at=1.0)
    for id in ("first", "second"):
        stage.ask(id, at=0.5)
    stage.step(at=2.0)
    stage.step(at=3.0)

    explained = {id: stage.scheduler.explain(RequestId(id)) for id in ("cold", "first", "second", "sits", "runs1")}
    assert {id: (refusal.reason, refusal.since) for id, refusal in explained.items() if refusal} == {
        "cold": ("its adapter is not in a slot", 0.0),
        "first": ("as many requests run as may run", 2.0),
        "second": ("others of its adapter came first", 0.5),
    }


def test_a_delayed_request_says_when_to_ask_again():
    policy = replace(WAIT, enable_prefill_delayer=True, prefill_delayer_max_delay_ms=500.0)
    stage = Stage(adapters=0, rows=4, policy=policy)
    for id in "abc":
        stage.ask(id, max_new_tokens=50)
    stage.step()
    stage.ask("held", at=1.0)
    stage.step(at=1.0)

    refusal = stage.scheduler.explain(RequestId("held"))
    assert refusal is not None
    assert "start together" in refusal.reason
    assert refusal.ask_again_at == 1.5


def test_one_that_runs_or_ended_has_nothing_to_explain():
    stage = Stage(adapters=0, config=SchedulerConfig())
    stage.ask("r", max_new_tokens=2)
    stage.step()
    assert stage.said(Admitted)
    assert stage.scheduler.explain(RequestId("r")) is None

    stage.step()
    assert stage.said(Finished)
    assert stage.scheduler.explain(RequestId("r")) is None


def test_a_block_stays_free_for_every_running_sequence():
    """Two sequences run in one block each. Of ten blocks a prompt may take six, and no seventh."""
    for prompt, is_admitted in ((6 * 16, True), (7 * 16, False)):
        stage = Stage(adapters=0, blocks=10)
        for number in range(2):
            stage.ask(f"runs{number}", prompt=4, max_new_tokens=40)
        stage.step()
        stage.ask("comes", prompt=prompt)

        assert seated(stage.step()) == (["comes"] if is_admitted else [])
