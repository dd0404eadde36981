"""The Grafana dashboard asks only for what there is."""

from __future__ import annotations

import json
from pathlib import Path

import promql_parser as promql
import pytest

from rota.observe.metric_table import METRICS
from tests.observe.promql import labels_of, nodes, parsed, series

FILE = Path(__file__).parents[2] / "docs/grafana/rota-dashboard.json"
DASHBOARD = json.loads(FILE.read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
VARIABLES = {variable["name"] for variable in DASHBOARD["templating"]["list"]}


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[title for title, _ in QUERIES])
def test_a_query_uses_names_and_labels_that_exist_and_rates_only_what_counts(query):
    tree = list(nodes(parsed(query)))
    selectors = [node for node in tree if isinstance(node, promql.VectorSelector)]
    assert selectors

    known: set[str] = set()
    for selector in selectors:
        metric = series()[selector.name]
        labels = labels_of(metric)
        known |= labels
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels
    for node in tree:
        if isinstance(node, promql.AggregateExpr) and node.modifier:
            assert set(node.modifier.labels) <= known
        if isinstance(node, promql.Call) and node.func.name in ("rate", "increase"):
            assert series()[node.args[0].vector_selector.name].kind != "gauge"
        if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
            assert "le" in node.args[1].modifier.labels


def test_what_is_told_of_keys_is_told_of_the_chosen_ones():
    of_keys = [query for _, query in QUERIES if "rota_key_" in query]

    assert of_keys
    assert all(query.count("rota_key_") == query.count('key=~"$key"') for query in of_keys)


def test_every_metric_is_on_the_dashboard():
    shown = {
        node.name for _, query in QUERIES for node in nodes(parsed(query)) if isinstance(node, promql.VectorSelector)
    }

    assert {series()[name] for name in shown} == set(METRICS)


def test_panels_stand_side_by_side_within_the_width_of_a_page():
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_a_dashboard_has_what_grafana_needs_to_load_it():
    assert DASHBOARD["title"]
    assert DASHBOARD["uid"]
    assert DASHBOARD["id"] is None  # or an import would overwrite somebody else's
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_variables_that_queries_use_are_defined_and_ask_for_what_exists():
    used = {word for word in ("instance", "adapter", "key") for _, query in QUERIES if f"${word}" in query}
    asked = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]

    assert used == VARIABLES - {"datasource"}
    assert "datasource" in VARIABLES
    for definition in asked:
        name = definition.removeprefix("label_values(").partition(",")[0].partition("{")[0]
        assert name in series()
