"""Queries of Prometheus, parsed: their parts, and the series that a query may name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from rota.observe.metric import Metric
from rota.observe.metric_table import METRICS

# Every series carries it: Prometheus adds where it scraped.
SCRAPED_FROM = "instance"


def series() -> dict[str, Metric]:
    """Every name that a query may use."""
    found: dict[str, Metric] = {}
    for metric in METRICS:
        endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.name + ending: metric for ending in endings}
    return found


def parsed(query: str) -> Any:
    return promql.parse(query.replace("$__rate_interval", "5m"))


def nodes(node: Any) -> Iterator[Any]:
    yield node
    match node:
        case promql.Call():
            inner = node.args
        case promql.BinaryExpr():
            inner = [node.lhs, node.rhs]
        case promql.AggregateExpr() | promql.ParenExpr():
            inner = [node.expr]
        case promql.MatrixSelector():
            inner = [node.vector_selector]
        case promql.VectorSelector() | promql.NumberLiteral():
            inner = []
        case _:
            raise AssertionError(f"no test looks into {type(node)}")
    for one in inner:
        yield from nodes(one)


def labels_of(metric: Metric) -> set[str]:
    """The labels of its series."""
    return {SCRAPED_FROM, *metric.labels} | ({"le"} if metric.kind == "histogram" else set())
