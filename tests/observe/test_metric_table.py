from __future__ import annotations

from rota.observe.metric_table import METRICS


def test_names_follow_the_customs_of_prometheus():
    names = [metric.name for metric in METRICS]

    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith(("rota_", "process_"))
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.sentence.endswith(".")
