from __future__ import annotations

from rota.core.errors import Fault, FaultCode
from rota.core.events import Admitted, Finished, FinishReason
from rota.core.ids import BASE
from rota.observe.meters import IDLE_S
from rota.observe.metrics import Metrics
from tests.observe.scraped import scrape
from tests.observe.test_metrics import finished, make, one_request


def opened(metrics: Metrics, id: str, key: str, at: float = 0.0) -> None:
    metrics.asked(id, BASE, at)
    metrics.owned([id], key, "call", key)


def test_a_request_counts_for_its_adapter_and_for_its_key():
    metrics = make()
    one_request(metrics, "a", adapter=1, key="acme")
    one_request(metrics, "b", adapter=2, key="acme")
    one_request(metrics, "c", adapter=2, key="birds")
    read = scrape(metrics)

    assert read("rota_requests_total", adapter="adapter2", outcome="length") == 2
    assert read("rota_key_requests_total", key="acme", outcome="length") == 2
    assert read("rota_key_prompt_tokens_total", key="acme") == 80
    assert read("rota_key_output_tokens_total", key="acme") == 6
    assert read("rota_key_queue_wait_seconds_sum", key="acme") == 0.5
    assert read("rota_key_output_tokens_total", key="birds") == 3


def test_open_requests_of_a_key_are_those_that_have_not_ended():
    metrics = make()
    for id in ("a", "b", "c"):
        opened(metrics, id, "acme")
    metrics.observe([Finished(request_id="b", at=1.0, reason=FinishReason.ABORT)])

    assert scrape(metrics)("rota_key_requests_open", key="acme") == 2


def test_a_request_that_the_queue_refused_counts_by_its_fault_and_has_no_prompt():
    metrics = make()
    opened(metrics, "a", "acme")
    metrics.observe([finished("a", reason=FinishReason.FAILED, fault=Fault(FaultCode.QUEUE_FULL, "Full."))])
    read = scrape(metrics)

    assert read("rota_key_requests_total", key="acme", outcome="queue_full") == 1
    assert read("rota_key_prompt_tokens_total", key="acme") == 0


def test_a_preempted_request_waits_once_for_its_key_too():
    metrics = make()
    opened(metrics, "a", "acme", at=1.0)
    metrics.observe([Admitted(request_id="a", at=at, cached_tokens=0) for at in (2.0, 9.0)])

    assert scrape(metrics)("rota_key_queue_wait_seconds_sum", key="acme") == 1.0


def test_a_limit_that_was_met_is_counted_without_a_request():
    metrics = make()
    for limit in ("tokens_per_minute", "max_tokens_in_flight", "tokens_per_minute"):
        metrics.limit_met("acme", limit, 1.0)
    read = scrape(metrics)

    assert read("rota_key_limits_met_total", key="acme", limit="tokens_per_minute") == 2
    assert read("rota_key_limits_met_total", key="acme", limit="max_tokens_in_flight") == 1
    assert read("rota_key_requests_open", key="acme") == 0


def test_keys_that_come_and_go_for_weeks_leave_a_bounded_number_of_series():
    metrics = make(most_keys=3)
    labels: set[str] = set()
    for number in range(500):
        one_request(metrics, f"r{number}", at=number * IDLE_S, key=f"key{number}")
        shown = [one.label for one in metrics.keys]
        assert len(shown) <= 4
        labels.update(shown)

    assert len(labels) > 400, "an idle key gives its place to the next"


def test_a_key_with_an_open_request_keeps_its_place():
    metrics = make(most_keys=1)
    opened(metrics, "long", "acme")
    one_request(metrics, "a", at=10 * IDLE_S, key="birds")

    assert [one.label for one in metrics.keys] == ["acme", "other"]
