"""Metrics have a bounded number of series and a bounded cost, however many adapters and versions there were."""

from __future__ import annotations

from rota.core.errors import Fault, FaultCode
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    AdapterStanding,
    Event,
    Finished,
    FinishReason,
    Inspected,
    Produced,
    SlotChanged,
    SlotState,
)
from rota.core.ids import AdapterId, EngineId, RequestId, Slot
from rota.observe.meters import IDLE_S, MOST_ADAPTERS, MOST_TARGETS
from rota.observe.metrics import Metrics
from tests.counting import calls_in
from tests.observe.scraped import scrape

# ── places ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make(most: int = 2, name_of=lambda adapter: f"adapter{adapter}") -> Metrics:
    return Metrics(name_of, most_adapters=most)


def ask_and_end(metrics: Metrics, adapter: int, at: float = 0.0) -> None:
    metrics.asked(f"r{adapter}", adapter, at)
    metrics.observe([Finished(request_id=f"r{adapter}", at=at, reason=FinishReason.STOP)])


def counted(metrics: Metrics) -> dict[str, float]:
    """Requests that stopped, by label."""
    samples = [sample for sample in scrape(metrics).samples if sample.name == "rota_requests_total"]
    return {sample.labels["adapter"]: sample.value for sample in samples}


def test_the_first_to_be_asked_for_have_series_of_their_own_and_the_rest_share_one():
    metrics = make(most=2)
    for adapter in (1, 2, 3, 4, 1):
        ask_and_end(metrics, adapter)

    assert counted(metrics) == {"adapter1": 2, "adapter2": 1, "other": 2}


def test_the_base_model_needs_no_place():
    metrics = make(most=0)
    for adapter in (0, 1):
        ask_and_end(metrics, adapter)

    assert counted(metrics) == {"base": 1, "other": 1}


def test_there_is_no_other_until_somebody_is():
    metrics = make(most=1)
    ask_and_end(metrics, 1)

    assert scrape(metrics).adapters("rota_output_tokens_total") == {"base", "adapter1"}


def test_an_adapter_that_was_unloaded_gives_its_place_to_the_next():
    metrics = make(most=2)
    for adapter in (1, 2):
        ask_and_end(metrics, adapter)
    metrics.observe([AdapterRemoved(1, at=1.0)])
    assert counted(metrics) == {"adapter1": 1, "adapter2": 1}  # its last numbers can still be scraped

    ask_and_end(metrics, 3, at=2.0)
    assert counted(metrics) == {"adapter2": 1, "adapter3": 1}


def test_a_busy_adapter_takes_the_place_of_one_long_idle_but_not_of_one_that_rests():
    metrics = make(most=2)
    ask_and_end(metrics, 1, at=0.0)
    ask_and_end(metrics, 2, at=IDLE_S - 1)
    ask_and_end(metrics, 3, at=IDLE_S - 1)
    ask_and_end(metrics, 3, at=IDLE_S + 1)
    ask_and_end(metrics, 4, at=IDLE_S + 1)

    assert counted(metrics) == {"adapter2": 1, "adapter3": 1, "other": 2}


def test_an_adapter_with_an_open_request_keeps_its_place_however_long_that_takes():
    metrics = make(most=1)
    metrics.asked("long", 1, 0.0)
    ask_and_end(metrics, 2, at=10 * IDLE_S)
    metrics.observe([Finished(request_id="long", at=10 * IDLE_S, reason=FinishReason.STOP)])

    assert counted(metrics) == {"adapter1": 1, "other": 1}


def test_a_name_that_is_loaded_again_goes_on_in_its_old_series():
    names = {1: "pirate", 2: "pirate"}
    metrics = make(name_of=names.get)
    ask_and_end(metrics, 1)
    metrics.observe([AdapterRemoved(1, at=1.0)])
    ask_and_end(metrics, 2, at=2.0)

    assert counted(metrics) == {"pirate": 2}


def test_adapters_that_come_and_go_for_weeks_leave_nothing_behind():
    metrics = make(most=3)
    sizes = set()
    for adapter in range(1, 2001):
        at = adapter * 60.0
        ask_and_end(metrics, adapter, at)
        metrics.observe([SlotChanged(at=at, slot=adapter % 2, adapter_id=adapter, state=SlotState.READY)])
        metrics.observe(
            [
                SlotChanged(at=at, slot=adapter % 2, adapter_id=adapter, state=SlotState.EMPTY),
                AdapterRemoved(adapter, at),
            ]
        )
        if adapter % 100 == 0:
            sizes.add(len(scrape(metrics).samples))

    assert len(sizes) == 1
    assert len(metrics._labels) == 1  # the base model's


def test_a_request_that_came_just_after_its_adapter_went_leaves_nothing_behind():
    metrics = make()
    metrics.observe([AdapterRemoved(7, at=1.0)])
    metrics.asked("late", 7, 1.0)
    metrics.observe(
        [
            Finished(
                request_id="late", at=1.0, reason=FinishReason.FAILED, fault=Fault(FaultCode.UNKNOWN_ADAPTER, "Gone.")
            )
        ]
    )

    assert 7 not in metrics._labels


def test_waiting_requests_of_adapters_without_a_place_add_up():
    metrics = make(most=1)
    for adapter in (1, 2, 3):
        metrics.asked(f"r{adapter}", adapter, 0.0)
    standings = tuple(
        AdapterStanding(adapter_id=adapter, waiting=adapter, running=0, parked=0, oldest_at=1.0, reason="why")
        for adapter in (1, 2, 3)
    )
    read = scrape(metrics, Inspected(at=2.0, steps=1, rows=0, blocks=8, blocks_used=0, slots=2, adapters=standings))

    assert read("rota_requests_waiting", adapter="adapter1") == 1
    assert read("rota_requests_waiting", adapter="other") == 5
    assert read("rota_oldest_wait_seconds", adapter="other") == 1.0


# ── thousands of adapters ─────────────────────────────────────────────────────────────────────────────────────────────

REGISTERED = 10_000
SLOTS = 4


class Server:
    """Adapters come, are asked for and go, as a server's observers hear of it."""

    def __init__(self) -> None:
        self.names: dict[AdapterId, str] = {}
        self.metrics = Metrics(self.names.get)
        self.at = 0.0

    def add(self, name: str) -> AdapterId:
        adapter = AdapterId(len(self.names) + 1)
        self.names[adapter] = name
        self.tell(AdapterAdded(adapter, self.at))
        return adapter

    def tell(self, *events: Event) -> None:
        self.metrics.observe(events)

    def use(self, adapter: AdapterId, target: str = "") -> None:
        """One answer of one token, in a slot that the adapter gets and loses."""
        self.at += 1.0
        request, slot = RequestId(f"r{self.at}"), Slot(adapter % SLOTS)
        self.metrics.asked(request, adapter, self.at)
        if target:
            self.metrics.routed([request], self.names[adapter], target)
        for state in (SlotState.LOADING, SlotState.READY):
            self.tell(SlotChanged(at=self.at, slot=slot, adapter_id=adapter, state=state, engine_id=EngineId(0)))
        self.tell(Produced(at=self.at, request_ids=(request,), tokens=(7,), step_s=0.01))
        self.tell(Finished(request_id=request, at=self.at, reason=FinishReason.STOP, output_tokens=1))

    def renew(self, name: str, versions: int) -> None:
        """So many versions of one name, as a training run sends them, each a target of a route."""
        for _ in range(versions):
            new = self.add(name)
            self.use(new, f"{name}@{new}")
            self.tell(AdapterRemoved(new, self.at))


def series(server: Server) -> int:
    """The samples that name an adapter."""
    return sum("adapter" in sample.labels for sample in scrape(server.metrics).samples)


def test_series_are_as_many_for_thousands_of_adapters_and_versions_as_for_the_first():
    server = Server()
    adapters = [server.add(f"adapter{number}") for number in range(REGISTERED)]
    for adapter in adapters[: MOST_ADAPTERS + SLOTS]:
        server.use(adapter)
    server.renew("policy", MOST_TARGETS + 1)
    first = series(server)
    for adapter in adapters[:3000]:
        server.use(adapter)
    server.renew("policy", 2000)
    for adapter in adapters[3000:4000]:
        server.tell(AdapterRefused(adapter_id=adapter, at=server.at, reason="gone"))

    assert series(server) == first
    scraped = scrape(server.metrics)
    assert sum(sample.name == "rota_target_requests_total" for sample in scraped.samples) <= MOST_TARGETS + 1
    assert (scraped("rota_adapters_loaded"), scraped("rota_adapters_lost")) == (REGISTERED - 1000, 1000)


def test_what_is_kept_of_versions_that_left_does_not_grow():
    server = Server()
    server.renew("policy", 500)

    assert len(server.metrics.with_places()) <= 1
    assert not server.metrics.loaded
    assert not server.metrics.journeys


def test_an_event_costs_the_same_however_many_adapters_there_are():
    def calls(adapters: int) -> int:
        server = Server()
        for number in range(adapters):
            last = server.add(f"adapter{number}")
        refusal = AdapterRefused(adapter_id=last, at=0.0, reason="gone")
        return calls_in(lambda: (server.use(last), server.tell(refusal)))[0]

    assert calls(10) == calls(1000)
