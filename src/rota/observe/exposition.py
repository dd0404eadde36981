"""Exposition writes a snapshot in the text format that Prometheus reads.

It is written in pieces that take a fraction of a millisecond each. A library's writer takes tens of milliseconds for
fifty adapters, and the endpoint picker scrapes twenty times a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from rota.observe.metric import Histogram, Labels, Metric
from rota.observe.metric_table import GROUPS, PICKER_GROUPS, Row
from rota.observe.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Rows in one piece: of histograms some 0.1 ms.
PIECE = 16

# Characters of a label's value that is kept for the next scrape.
MOST_REMEMBERED = 256


def pieces(taken: Snapshot) -> Iterator[str]:
    """The text in pieces, so that between two of them tokens can leave. Sums may grow by a token meanwhile."""
    groups = GROUPS if taken.wall_at is None else (*GROUPS, *PICKER_GROUPS)
    for group in groups:
        if (rows := group.rows(taken)) is None:
            continue
        for metric in group.metrics:
            yield f"# HELP {metric.name} {metric.sentence}\n# TYPE {metric.name} {metric.kind}\n"
            for start in range(0, len(rows), PIECE):
                piece = rows[start : start + PIECE]
                yield "".join((_histograms if metric.kind == "histogram" else _numbers)(metric, piece))


def _numbers(metric: Metric, rows: Sequence[Row]) -> list[str]:
    """A gauge or a counter."""
    name, read = metric.name, metric.read
    if metric.by:
        samples = [((*labels, word), number) for labels, one in rows for word, number in read(one).items()]
    else:
        samples = [(labels, read(one)) for labels, one in rows]
    return [f"{name}{_braced(metric, labels)} {_number(value)}\n" for labels, value in samples]


def _histograms(metric: Metric, rows: Sequence[Row]) -> list[str]:
    """A bucket of Prometheus also counts all values below it."""
    return [_histogram(metric, labels, metric.read(one)) for labels, one in rows]


def _histogram(metric: Metric, labels: Labels, histogram: Histogram) -> str:
    counts, text = histogram.written
    if counts == histogram.counts:
        return text
    template = _template(metric.name, histogram.bounds, _pairs(metric, labels))
    counts = histogram.counts.copy()
    below = [*accumulate(counts)]
    text = template % (*below, below[-1], histogram.sum)
    histogram.written = (counts, text)
    return text


@lru_cache(maxsize=4096)
def _template(name: str, bounds: tuple[float, ...], pairs: str) -> str:
    """The lines of one histogram, with fields for its buckets, its count and its sum."""
    name, pairs = name.replace("%", "%%"), pairs.replace("%", "%%")
    marks = [*map(_number, bounds), "+Inf"]
    buckets = [f'{name}_bucket{{{pairs},le="{mark}"}} %d\n' for mark in marks]
    return f"{''.join(buckets)}{name}_count{{{pairs}}} %d\n{name}_sum{{{pairs}}} %r\n"


def _braced(metric: Metric, labels: Labels) -> str:
    return f"{{{_pairs(metric, labels)}}}" if labels else ""


def _pairs(metric: Metric, labels: Labels) -> str:
    # Names recur in many metrics and in every scrape; lists of a thousand names do not.
    is_short = len(labels[-1]) <= MOST_REMEMBERED
    return (_remembered if is_short else _joined)(metric.labels, labels)


def _joined(names: Labels, values: Labels) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)])


_remembered = lru_cache(maxsize=4096)(_joined)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))
