from __future__ import annotations

from rota.core.events import Produced
from rota.observe.metrics import Metrics
from tests.counting import calls_in

ROWS = 256


def test_a_full_step_costs_one_call_a_token():
    """That is half a microsecond a token; a lock and a walk through buckets for each would be many calls."""
    metrics = Metrics(lambda adapter: f"adapter{adapter}")
    ids = tuple(f"cmpl-{number:032x}-0-0" for number in range(ROWS))
    for number, id in enumerate(ids):
        metrics.asked(id, number % 40, 0.0)
        metrics.owned([id], "acme", "call", "acme")
    for step in range(3):
        event = Produced(at=0.02 * step, request_ids=ids, tokens=(7,) * ROWS, step_s=0.02)
        calls, _ = calls_in(lambda event=event: metrics.observe([event]))

        assert calls < 1.1 * ROWS
