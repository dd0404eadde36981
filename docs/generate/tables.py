"""Tables in Markdown, and those of them that the code has as tables already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rota.observe.metric import Metric
from rota.observe.metric_table import METRICS, PICKER_METRICS
from rota.server.calls.known_fields import IGNORABLE
from rota.server.errors import ERROR_KINDS


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(map(_line, (head, ["---"] * len(head), *rows)))


def _line(cells: Sequence[str]) -> str:
    # A bar ends a cell, also within backticks.
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def code(word: object) -> str:
    return f"`{word}`"


def listed(words: Iterable[object]) -> str:
    return ", ".join(map(code, words))


def errors() -> str:
    """Every fault that the server tells a client of."""
    kinds = sorted(ERROR_KINDS.items(), key=lambda entry: entry[1].status)
    rows = [
        (str(kind.status), code(fault), code(kind.type), _seconds(kind.retry_after_s), kind.meaning)
        for fault, kind in kinds
    ]
    return table(["status", "code", "type", "Retry-After", "when"], rows)


def ignored_fields() -> str:
    """The fields that are ignored, by the values at which they are."""
    rows = [(listed(one.names.split()), _values(one.values), one.why) for one in IGNORABLE]
    return table(["fields", "at", "why"], rows)


def _values(values: Sequence[object] | None) -> str:
    if values is None:
        return "every value"
    return listed(values) or "an empty value"


def metrics() -> str:
    return _metrics(METRICS)


def picker_metrics() -> str:
    """The names that the endpoint picker of Kubernetes reads."""
    return _metrics(PICKER_METRICS)


def _metrics(metrics: Iterable[Metric]) -> str:
    rows = [
        (code(metric.name) + " *" * metric.is_asked, metric.kind, listed(metric.labels), metric.sentence)
        for metric in metrics
    ]
    return table(["metric", "kind", "labels", "meaning"], rows)


def _seconds(time_s: int | None) -> str:
    return "" if time_s is None else f"{time_s} s"
