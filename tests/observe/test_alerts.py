"""The alert rules ask only for what there is, and what they say has what it names."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from rota.observe.metric_table import METRICS
from tests.observe.promql import labels_of, nodes, parsed, series

FILE = Path(__file__).parents[2] / "docs/grafana/rota-alerts.yml"
(GROUP,) = yaml.safe_load(FILE.read_text("utf-8"))["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
# What Prometheus takes: whole numbers with units, the longest unit first.
DURATION = re.compile(r"(?=.)(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?")
FUNCTIONS = {"humanize", "humanizeDuration", "humanizePercentage"}


def selectors(rule: dict[str, object]) -> list[promql.VectorSelector]:
    return [node for node in nodes(parsed(rule["expr"])) if isinstance(node, promql.VectorSelector)]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_compares_metrics_that_exist_by_labels_that_they_have(name):
    rule = RULES[name]
    tree = parsed(rule["expr"])
    assert isinstance(tree, promql.BinaryExpr), "an alert is a comparison"
    assert isinstance(tree.rhs, promql.NumberLiteral)
    for selector in selectors(rule):
        metric = series()[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels_of(metric)
    for node in nodes(tree):
        if isinstance(node, promql.Call) and node.func.name in ("rate", "increase"):
            assert series()[node.args[0].vector_selector.name].kind != "gauge", "a gauge has no rate"


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_the_fields_of_a_rule_and_its_sentences_name_what_it_has(name):
    rule = RULES[name]
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Rota[A-Z]\w+", name)
    assert DURATION.fullmatch(rule.get("for", "1m"))
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "description"}

    sums = [node for node in nodes(parsed(rule["expr"])) if isinstance(node, promql.AggregateExpr)]
    left = (
        set.intersection(*(set(one.modifier.labels) for one in sums))
        if sums
        else labels_of(series()[selectors(rule)[0].name])
    )
    for template in re.findall(r"\{\{(.*?)\}\}", " ".join(rule["annotations"].values())):
        named, _, function = template.partition("|")
        assert named.strip() == "$value" or named.strip().removeprefix("$labels.") in left - {"le"}
        assert function.strip() in {"", *FUNCTIONS}


def test_rules_have_names_of_their_own():
    assert len(RULES) == len(GROUP["rules"])


def test_what_a_broken_rule_would_be_told():
    for broken in ("rota_paused ==", "sum by (rota_paused) > 1 >", "rate(rota_paused) > 1", "rota_paused[5m] > 1"):
        with pytest.raises(ValueError, match=r"\w"):
            parsed(broken)
    assert "rota_pausd" not in series()
    assert len(series()) > len(METRICS)
