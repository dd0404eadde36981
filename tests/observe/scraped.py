"""What a scraper reads: samples by name and labels."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from rota.core.events import Inspected
from rota.observe.exposition import pieces
from rota.observe.metrics import Metrics
from rota.observe.snapshot import EngineReport, Snapshot, process_stats_of


class Scrape:
    """`scrape("rota_slots")`, `scrape("rota_ttft_seconds_count", adapter="base")`; None if there is no such sample."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float | None:
        found = [sample.value for sample in self.samples if sample.name == name and sample.labels == labels]
        assert len(found) < 2, f"{name} {labels} is there {len(found)} times"
        return found[0] if found else None

    def adapters(self, name: str) -> set[str]:
        return {sample.labels["adapter"] for sample in self.samples if sample.name == name}


def scrape(
    metrics: Metrics, inspected: Inspected | None = None, is_up: bool = True, engine_pid: int | None = None
) -> Scrape:
    report = EngineReport(is_up=is_up, pid=engine_pid, inspected=inspected)
    return Scrape(text_of(metrics, [report]))


def text_of(metrics: Metrics, reports: Sequence[EngineReport], wall_at: float | None = None) -> str:
    """The whole text at once."""
    stats = process_stats_of(reports)
    return "".join(pieces(Snapshot(metrics=metrics, reports=tuple(reports), stats=stats, wall_at=wall_at)))
