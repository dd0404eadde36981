"""What the page tells of errors: each once, by kind, and without a word of what a client sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.errors import Fault, FaultCode
from rota.server.errors import ERROR_KINDS, note
from tests.dashboard.stage import Stage, breaks_at_forty, stage
from tests.waiting import until

SECRET = "my grandmother's maiden name"


def errors_of(made: Stage) -> dict[str, dict[str, Any]]:
    with httpx.stream("GET", f"{made.url}/dashboard/events?window=300") as reply:
        frame = json.loads(next(reply.iter_lines()).removeprefix("data: "))
    return {row["kind"]: row for row in frame["errors"]}


@pytest.mark.parametrize("code", FaultCode)
def test_a_clients_mistake_is_told_by_its_kind_and_ours_in_our_words(code):
    told: list[tuple[str, str]] = []
    note(lambda kind, sentence, _: told.append((kind, sentence)), Fault(code, SECRET))
    is_ours = ERROR_KINDS[code].status >= 500 or code is FaultCode.ADAPTER_FAILED

    assert [kind for kind, _ in told] == [code.value]
    assert (SECRET in told[0][1]) is is_ours
    assert "`" not in told[0][1]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.usefixtures("capsys")
def test_every_error_is_counted_once_whether_it_comes_first_or_ends_a_stream(tmp_path: Path, is_streamed: bool):
    with stage(tmp_path, next_token=breaks_at_forty) as made:

        def ask(**fields: Any) -> httpx.Response:
            body = {"prompt": SECRET[:9], "stream": is_streamed, **fields}
            return httpx.post(f"{made.url}/v1/completions", json=body)

        assert ask(temperature=-1, stop=[SECRET]).status_code == 400
        assert ask(model=SECRET).status_code == 404
        ask(max_tokens=100, ignore_eos=True)  # its engine dies
        assert until(lambda: "engine_died" in errors_of(made))
        errors = errors_of(made)

    assert {kind: row["total"] for kind, row in errors.items()} == {
        "bad_field": 1,
        "model_not_found": 1,
        "engine_died": 1,
    }
    assert "a kernel went wrong" in errors["engine_died"]["sentence"]
    assert SECRET not in json.dumps(errors)


def test_a_window_that_there_is_not_is_refused(tmp_path: Path):
    with stage(tmp_path) as made:
        refused = httpx.get(f"{made.url}/dashboard/events?window=7")

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "window")
