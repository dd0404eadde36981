"""Traffic follows its routes, leaves a target that fails or goes, and is split fairly and truly."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import AdapterRefused, AdapterRemoved, EngineRestarted, Finished, FinishReason
from rota.core.lora_paths import LoraPath
from rota.core.request import Request
from rota.observe.journey import Journey
from rota.observe.meters import AdapterMeters
from rota.runtime.registry import Registry
from rota.server.traffic.route import MOST_TARGETS, Route, TrafficSplit, check_weights
from rota.server.traffic.traffic import DIES_AGAIN_S, Shadows, Traffic


def unsent(_request: Request) -> NoReturn:
    raise AssertionError("nothing is copied here")


class Stage:
    """An adapter named legal, in versions 1 (current) and 2, another named poet, and a route between them."""

    def __init__(
        self,
        rollback: str = "legal@1",
        shadow: str | None = None,
        set_by: str | None = None,
        is_open_to: Callable[[str, Adapter], bool] = lambda *_: True,
        **weights: float,
    ) -> None:
        self.registry = Registry("letters", "/models/letters")
        self.legal = self.registry.add(LoraPath(name="legal", path="/adapters/legal"))
        self.new = self.registry.renew(LoraPath(name="legal", path="/adapters/new"))
        self.registry.stage(self.new)
        self.poet = self.registry.add(LoraPath(name="poet", path="/adapters/poet"))
        self.traffic = Traffic(self.registry, Shadows(unsent, lambda: 8), now=lambda: 1000.0, is_open_to=is_open_to)
        self.meters = self.traffic.meters
        weights = weights or {"legal@1": 0.5, "legal@2": 0.5}
        self.traffic.set(
            Route(name="legal", split=TrafficSplit(weights), rollback=rollback, shadow=shadow, set_by=set_by)
        )

    @property
    def route(self) -> Route:
        route = self.traffic.route_of("legal")
        assert route
        return route

    def asked(self, times: int = 8) -> set[str]:
        """The labels of those that answer."""
        return {self.traffic.choose(self.legal, None).adapter.label for _ in range(times)}

    def end(self, adapter: Adapter, code: FaultCode, at: float = 1.0) -> None:
        journey = Journey(adapter.adapter_id, adapter.name, 0.0, AdapterMeters(adapter.name))
        fault = Fault(code, "So it is.")
        self.traffic.ended("a", journey, Finished(request_id="a", at=at, reason=FinishReason.FAILED, fault=fault))


def test_a_name_without_a_route_means_its_current_version():
    stage = Stage()
    chosen = stage.traffic.choose(stage.poet, "ann")

    assert (chosen.adapter, chosen.target, chosen.shadow) == (stage.poet, "", None)


def test_a_route_may_name_versions_other_adapters_and_the_name_itself():
    stage = Stage(rollback="legal", **{"legal": 0.4, "legal@2": 0.3, "poet": 0.3})
    assert stage.asked() == {"legal@1", "legal@2", "poet@1"}
    assert sum(stage.route.requests.values()) == 8

    stage.registry.switch(stage.new)
    assert stage.asked() == {"legal@2", "poet@1"}, "the name means its current version"


def test_a_version_that_a_route_needs_is_held():
    stage = Stage(rollback="legal@1", shadow="poet@1", **{"legal@2": 1.0})
    assert [stage.traffic.holds(one) for one in (stage.legal, stage.new, stage.poet)] == [True] * 3

    stage.traffic.end("legal")
    assert not any(stage.traffic.holds(one) for one in (stage.legal, stage.new, stage.poet))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (FaultCode.NOT_A_NUMBER, "'legal@2' computed a value that is not a number."),
        (FaultCode.ADAPTER_FAILED, "'legal@2' could not be served."),
        (FaultCode.SOURCE_AWAY, "'legal@2' could not be read: its source is away."),
        (FaultCode.DISK_FULL, "'legal@2' could not be read: the server's disk is full."),
        (FaultCode.DISK_FAILED, "'legal@2' could not be read: the server's disk fails."),
    ],
)
def test_a_target_that_fails_rolls_its_route_back(code, words, caplog):
    stage = Stage()
    with caplog.at_level(logging.WARNING, "rota.traffic"):
        stage.end(stage.new, code)
        stage.end(stage.new, code)  # a request that ran beside it

    assert stage.asked() == {"legal@1"}
    assert stage.route.rolled_back
    assert (stage.route.rolled_back.reason, stage.route.rolled_back.at) == (words, 1000.0)
    assert stage.route.rolled_back.targets == {"legal@1": 0.5, "legal@2": 0.5}
    assert [record.fields["why"] for record in caplog.records] == [words]
    assert stage.meters.rollbacks == {code.value: 1}
    assert stage.meters.weights == [(("legal", "legal@1"), 1.0)]


@pytest.mark.parametrize("code", [FaultCode.QUEUE_FULL, FaultCode.ENGINE_DIED, FaultCode.TIMED_OUT])
def test_an_end_that_says_nothing_of_the_adapter_changes_nothing(code):
    stage = Stage()
    stage.end(stage.new, code)

    assert stage.route.rolled_back is None


def test_an_engine_that_dies_of_a_target_twice_rolls_its_route_back():
    stage = Stage(shadow="poet")
    for at in (1.0, 1.0 + DIES_AGAIN_S):  # two deaths far apart
        stage.traffic.observe([EngineRestarted(at=at, reason="It hung.", died_of=stage.new.adapter_id)])
    others = [stage.legal.adapter_id, stage.poet.adapter_id, None, None]
    stage.traffic.observe([EngineRestarted(at=2.0 + DIES_AGAIN_S, reason="It hung.", died_of=one) for one in others])
    for one in (stage.poet, stage.new, stage.legal):
        stage.end(one, FaultCode.ENGINE_DIED, 2.0 + DIES_AGAIN_S)
    assert stage.route.rolled_back is None, "deaths that are not its own say nothing of it"

    stage.traffic.observe([EngineRestarted(at=3.0 + DIES_AGAIN_S, reason="It hung.", died_of=stage.new.adapter_id)])
    assert stage.route.rolled_back
    words = "'legal@2' alone was read or served when an engine died, twice within 10 minutes."
    assert stage.route.rolled_back.reason == words
    assert stage.asked() == {"legal@1"}
    assert stage.route.shadow == "poet", "an engine died of it once"


def test_what_a_route_rolls_back_to_stays_whatever_it_does():
    stage = Stage()
    stage.end(stage.legal, FaultCode.NOT_A_NUMBER)

    assert stage.route.rolled_back is None


def test_a_target_that_an_engine_cannot_read_again_rolls_its_route_back():
    stage = Stage()
    event = AdapterRefused(adapter_id=stage.new.adapter_id, at=1.0, reason="Its folder is gone.")
    stage.traffic.observe([event])

    assert stage.route.rolled_back
    assert stage.route.rolled_back.reason == "'legal@2' could not be read: Its folder is gone."


def test_a_target_that_leaves_takes_no_request_with_it():
    stage = Stage()
    stage.registry.discard(stage.new.adapter_id)
    assert stage.asked() == {"legal@1"}, "also before the engine has said that it is gone"
    assert stage.route.rolled_back
    assert stage.route.rolled_back.reason == "'legal@2' was unloaded."


def test_a_target_that_leaves_is_noticed_without_a_request():
    stage = Stage()
    stage.registry.discard(stage.new.adapter_id)
    stage.traffic.observe([AdapterRemoved(stage.new.adapter_id, 1.0)])

    assert stage.route.rolled_back
    assert stage.meters.rollbacks == {"unloaded": 1}


def test_if_all_targets_have_left_the_name_answers_itself():
    stage = Stage(rollback="poet", **{"poet": 0.5, "legal@2": 0.5})
    for one in (stage.poet, stage.new):
        stage.registry.discard(one.adapter_id)

    assert stage.asked() == {"legal@1"}


def test_a_route_ends_with_its_name():
    stage = Stage()
    stage.registry.forget("legal")
    stage.traffic.observe([AdapterRemoved(stage.legal.adapter_id, 1.0)])

    assert stage.traffic.routes == []
    assert stage.meters.weights == []


@pytest.mark.parametrize("code", [FaultCode.NOT_A_NUMBER, FaultCode.ADAPTER_FAILED])
def test_a_shadow_that_fails_gets_no_more_copies_and_the_traffic_goes_on(code):
    stage = Stage(shadow="poet")
    assert stage.traffic.choose(stage.legal, None).shadow is stage.poet

    stage.end(stage.poet, code)
    assert stage.traffic.choose(stage.legal, None).shadow is None
    assert stage.route.shadow_ended.startswith("'poet' co")
    assert stage.route.rolled_back is None
    assert stage.meters.rollbacks == {}


def test_a_route_has_the_right_of_the_key_that_set_it_and_loses_a_target_with_that_right():
    rights = {"legal", "poet"}
    stage = Stage(
        set_by="acme",
        is_open_to=lambda key, adapter: key == "acme" and adapter.name in rights,
        **{"legal@1": 0.5, "poet": 0.5},
    )
    assert stage.asked() == {"legal@1", "poet@1"}

    rights.clear()
    assert stage.asked() == {"legal@1"}, "versions of the name itself need no right"
    assert stage.route.note == "Rolled back: the key 'acme', which set the route, may not use 'poet' any more."


def test_a_route_without_a_right_to_what_it_rolls_back_to_means_its_name_and_copies_nothing():
    rights = set[str]()
    is_open_to = lambda _, adapter: adapter.name in rights  # noqa: E731
    stage = Stage("poet", "poet", "acme", is_open_to, poet=1.0)

    chosen = stage.traffic.choose(stage.legal, None)
    assert (chosen.adapter, chosen.shadow) == (stage.legal, None)
    rights.add("poet")
    assert stage.asked() == {"poet@1"}, "the right is asked at every request"


def test_a_route_of_an_operators_needs_no_right_of_others():
    assert Stage(is_open_to=lambda *_: False, poet=1.0).asked() == {"poet@1"}


# ── splits ────────────────────────────────────────────────────────────────────────────────────────────────────────────

few = settings(max_examples=30)
ASKERS = [f"user {number}" for number in range(400)]
RAW = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=MOST_TARGETS)


def split(*raw: float) -> TrafficSplit:
    return TrafficSplit({f"legal@{number}": weight / math.fsum(raw) for number, weight in enumerate(raw)})


def sent(split: TrafficSplit) -> dict[str, str]:
    return {asker: split.choose(asker) for asker in ASKERS}


@few
@given(RAW, st.integers(1, 500))
def test_without_askers_no_count_is_ever_far_from_its_weight(raw, requests):
    one, counts = split(*raw), Counter[str]()
    for number in range(1, requests + 1):
        counts[one.choose()] += 1
        # The target that is furthest behind is served, so none is ever a whole request ahead of its weight.
        assert all(counts[target] - number * weight < 1.0 for target, weight in one.weights.items())
    assert all(requests * weight - counts[target] < len(raw) for target, weight in one.weights.items())


def test_the_first_requests_are_spread_and_not_bunched():
    one = TrafficSplit({"legal@7": 0.75, "legal@8": 0.25})

    assert [one.choose()[-1] for _ in range(8)] == ["7", "7", "8", "7", "7", "7", "8", "7"]


@few
@given(RAW)
def test_askers_are_shared_by_weight(raw):
    one = split(*raw)
    counts = Counter(sent(one).values())

    for target, weight in one.weights.items():
        # Six standard deviations: hashes are fixed, and so no run differs from another by chance.
        allowed = 6 * math.sqrt(len(ASKERS) * weight * (1 - weight)) + 1
        assert abs(counts[target] - len(ASKERS) * weight) < allowed


@few
@given(RAW, st.randoms(use_true_random=False))
def test_an_asker_has_the_same_target_in_every_server_and_whatever_else_is_asked(raw, chance):
    first, second = split(*raw), split(*raw)
    for asker in chance.sample(ASKERS, 20):
        first.choose()
        assert first.choose(asker) == second.choose(asker)


@few
@given(RAW, st.data())
def test_an_asker_moves_only_to_a_target_that_has_grown_relative_to_its_own(raw, data):
    later = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(raw), max_size=len(raw)))
    before, after = split(*raw), split(*later)

    for asker, left in sent(before).items():
        if (taken := after.choose(asker)) != left:
            assert after.weights[taken] / before.weights[taken] > after.weights[left] / before.weights[left]


@few
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_of_two_targets_a_change_moves_no_more_than_the_change(first, second):
    before, after = (TrafficSplit({"legal@7": 1.0 - share, "legal@8": share}) for share in (first, second))
    moved = [asker for asker, target in sent(before).items() if after.choose(asker) != target]

    share = abs(second - first)
    assert abs(len(moved) - len(ASKERS) * share) < 6 * math.sqrt(len(ASKERS) * share * (1 - share)) + 1
    assert {after.choose(asker) for asker in moved} <= {"legal@8" if second > first else "legal@7"}


def test_a_target_of_weight_0_gets_nothing():
    one = TrafficSplit({"legal@7": 1.0, "legal@8": 0.0})

    assert {one.choose() for _ in range(100)} | set(sent(one).values()) == {"legal@7"}


@pytest.mark.parametrize(
    ("weights", "param", "sentence"),
    [
        ({}, "targets", "targets must name 1 to 16 targets, not 0."),
        (dict.fromkeys(map(str, range(17)), 1 / 17), "targets", "targets must name 1 to 16 targets, not 17."),
        ({"a": 0.95, "b": 0.04}, "targets", "The weights in targets must sum to 1, not 0.99."),
        ({"a": 1.0, "b": 1.0}, "targets", "The weights in targets must sum to 1, not 2."),
        ({"a": 1.5, "b": -0.5}, "targets.a", "targets.a: a weight must be between 0 and 1, not 1.5."),
        ({"a": math.nan}, "targets.a", "targets.a: a weight must be between 0 and 1, not nan."),
    ],
)
def test_weights_that_cannot_be_are_refused_with_a_sentence(weights, param, sentence):
    with pytest.raises(RequestError) as refused:
        check_weights(weights)

    assert (refused.value.fault.param, refused.value.fault.message) == (param, sentence)


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 0.1, "b": 0.2, "c": 0.7}, dict.fromkeys("abc", 0.3333333)])
def test_weights_that_sum_within_rounding_are_taken(weights):
    check_weights(weights)
