"""A metric is a field of a record, and says its name, kind and meaning there, as an option of a config does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

Labels = tuple[str, ...]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One metric as a scraper sees it."""

    kind: Kind
    name: str
    sentence: str
    read: Callable[[Any], Any]  # its number or histogram in a record; with `by`, a number for each value of that label
    by: str = ""
    labels: Labels = ()
    is_asked: bool = False  # only the engine knows the value, and each scrape asks for it


class Histogram:
    """The number of values between one bound and the next, and the sum of all values.

    `written` keeps the text of the last scrape with the counts of then: between two scrapes few histograms change.
    """

    __slots__ = ("bounds", "counts", "sum", "written")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.written: tuple[list[int], str] = ([], "")

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def counter(name: str, sentence: str, by: str = "", of: Sequence[str] = ()) -> Any:
    """A number that only grows. `by` is a label with a number for each of its values; those in `of` begin at zero."""
    return _metric("counter", name, sentence, by, (lambda: dict.fromkeys(of, 0)) if by else int)


def gauge(name: str, sentence: str, default: float = 0) -> Any:
    return _metric("gauge", name, sentence, "", lambda: default)


def histogram(name: str, sentence: str, bounds: Sequence[float]) -> Any:
    return _metric("histogram", name, sentence, "", lambda: Histogram(bounds))


def _metric(kind: Kind, name: str, sentence: str, by: str, make: Callable[[], Any]) -> Any:
    return field(default_factory=make, metadata={"metric": (kind, name, sentence, by)})


def metrics_of(record: type) -> tuple[Metric, ...]:
    """The metrics among a record's fields, in their order."""
    return tuple(
        Metric(kind=kind, name=name, sentence=sentence, by=by, read=attrgetter(one.name))
        for one in fields(record)
        if "metric" in one.metadata
        for kind, name, sentence, by in [one.metadata["metric"]]
    )
