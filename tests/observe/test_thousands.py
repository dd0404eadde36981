"""Metrics have a bounded number of series and a bounded cost, however many adapters and versions there were."""

from __future__ import annotations

from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Event,
    Finished,
    FinishReason,
    Produced,
    SlotChanged,
    SlotState,
)
from rota.core.ids import AdapterId, EngineId, RequestId, Slot
from rota.observe.meters import MOST_ADAPTERS, MOST_TARGETS
from rota.observe.metrics import Metrics
from tests.counting import calls_in
from tests.observe.scraped import scrape

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
