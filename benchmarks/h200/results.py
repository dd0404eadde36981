"""A result is what one run gave: a file as soon as it is there, so that nothing is lost when time runs out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rota.core.ids import BASE, AdapterId
from rota.observe.summary import Recorder
from rota.workload.scenario import Scenario

Result = dict[str, Any]


def summarise(recorder: Recorder) -> dict[str, Any]:
    """As `rota bench` writes it; and, where both were asked, the base model and all adapters apart."""
    summary = recorder.summary(lambda adapter: "base" if adapter == BASE else f"adapter{adapter}")
    if BASE in recorder.gaps and len(recorder.gaps) > 1:
        summary["base"] = _part(recorder, lambda adapter: adapter == BASE)
        summary["tuned"] = _part(recorder, lambda adapter: adapter != BASE)
    return summary


def _part(recorder: Recorder, is_wanted: Callable[[AdapterId], bool]) -> dict[str, Any]:
    part = Recorder(
        {request_id: one for request_id, one in recorder.records.items() if is_wanted(one.adapter_id)},
        {adapter: gaps for adapter, gaps in recorder.gaps.items() if is_wanted(adapter)},
    ).summary()
    return {name: value for name, value in part.items() if name not in ("adapters", "fairness")}


def describe(scenario: Scenario) -> dict[str, Any]:
    return {"slots": scenario.slots, "clients": [dataclasses.asdict(client) for client in scenario.clients]}


def write_result(folder: Path, name: str, result: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def read_results(folder: Path) -> dict[str, Result]:
    """Every run's result in a folder, by name; several calls may have written into it."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((folder / "runs").glob("*.json"))}
    return {name: result for name, result in found.items() if "summary" in result}
