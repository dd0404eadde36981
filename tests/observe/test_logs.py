"""The log: a line for each request and each event of an engine, and nothing that is written to stderr passes it by."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from rota.core.errors import Fault, FaultCode
from rota.core.events import Admitted, EngineRestarted, Finished, FinishReason, Produced
from rota.core.ids import BASE
from rota.core.standstill import StoodStill, WentOn
from rota.observe.logs import JsonLines, TextLines, set_up_logs, stray_lines
from rota.observe.metrics import Metrics
from rota.observe.request_log import log_end, log_engines
from rota.runtime.lifeline import tied
from tests.waiting import TIMEOUT_S

# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def written():
    """What is logged, as a stream; gives a function that sets it up and one that reads it."""
    logger = logging.getLogger("rota")
    before = (logger.handlers, logger.propagate, logger.level)
    stream = io.StringIO()

    def write_as(*given) -> io.StringIO:
        set_up_logs(*given)
        logger.handlers[0].stream = stream
        return stream

    yield write_as
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def one_request() -> None:
    metrics = Metrics(lambda _: "pirate", on_end=log_end)
    metrics.asked("r1", 1, 10.0)
    metrics.owned(["r1"], owner="acme", call="my call")
    metrics.observe(
        [Admitted(request_id="r1", at=10.25, cached_tokens=16, reasons=("its adapter has no slot", "no KV"))]
    )
    metrics.observe(
        [Produced(at=10.5, request_ids=("r1",), tokens=(7,)), Produced(at=10.75, request_ids=("r1",), tokens=(8,))]
    )
    metrics.observe(
        [
            Finished(
                request_id="r1",
                at=11.0,
                reason=FinishReason.LENGTH,
                prompt_tokens=40,
                output_tokens=2,
                cached_tokens=16,
            )
        ]
    )


def test_a_request_is_one_line_of_json_with_all_there_is_to_say(written):
    stream = written("json", "info")
    one_request()
    line = json.loads(stream.getvalue())

    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "message": "request",
        "id": "r1",
        "call": "my call",
        "key": "acme",
        "adapter": "pirate",
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "output_tokens": 2,
        "finish": "length",
        "e2e_s": 1.0,
        "queue_wait_s": 0.25,
        "waited_for": ["its adapter has no slot", "no KV"],
        "ttft_s": 0.5,
    }


def test_the_same_line_as_text_keeps_what_has_spaces_together(written):
    stream = written("text", "info")
    one_request()
    line = stream.getvalue()

    assert line.count("\n") == 1
    assert ' INFO request id=r1 call="my call" key=acme adapter=pirate prompt_tokens=40' in line
    assert 'waited_for="its adapter has no slot; no KV" ttft_s=0.5\n' in line


def test_a_refused_request_says_why_and_has_no_times_it_never_reached(written):
    stream = written("json", "info")
    metrics = Metrics(lambda _: None, on_end=log_end)
    metrics.asked("r1", BASE, 10.0)
    metrics.observe(
        [Finished(request_id="r1", at=10.0, reason=FinishReason.FAILED, fault=Fault(FaultCode.QUEUE_FULL, "Full."))]
    )
    line = json.loads(stream.getvalue())

    assert (line["finish"], line["fault"], line["why"]) == ("failed", "queue_full", "Full.")
    assert not {"ttft_s", "queue_wait_s", "waited_for"} & line.keys()


def test_an_engine_that_died_is_a_warning_with_its_reason(written):
    stream = written("json", "info")
    log_engines([Produced(at=1.0, request_ids=(), tokens=()), EngineRestarted(at=2.0, reason="It was killed.")])
    line = json.loads(stream.getvalue())

    assert (line["level"], line["why"]) == ("warning", "It was killed.")


def test_a_standstill_is_logged_with_every_reason_and_is_an_error_if_nothing_is_under_way(written):
    stream = written("json", "info")
    still = StoodStill(
        at=20.0, since=10.0, requests=2, reasons=(("r1", "no slot"), ("r2", "no KV")), waits_for="a read"
    )
    log_engines([still, replace(still, waits_for=""), WentOn(25.0, 15.0)])
    waits, stuck, over = map(json.loads, stream.getvalue().splitlines())

    assert [line["level"] for line in (waits, stuck, over)] == ["warning", "error", "warning"]
    assert (waits["seconds"], waits["requests"], waits["waits_for"]) == (10.0, 2, "a read")
    assert waits["reasons"] == stuck["reasons"] == ["r1: no slot", "r2: no KV"]
    assert over["seconds"] == 15.0


@pytest.mark.parametrize("given", [("text", "warning"), ("text", "info", True)], ids=["warning", "quiet"])
def test_who_wants_only_warnings_or_quiet_gets_no_line_a_request(written, given):
    stream = written(*given)
    one_request()
    assert stream.getvalue() == ""

    logging.getLogger("rota.anything").warning("This matters.")
    assert "WARNING This matters." in stream.getvalue()


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()], ids=["text", "json"])
def test_nothing_that_a_client_sends_can_begin_a_new_line(formatter):
    record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", "fields": {"call": "a\nb", "key": "x=1"}})

    assert "\n" not in formatter.format(record)
    assert r"a\nb" in formatter.format(record)


def test_an_error_is_logged_with_its_trace_in_the_same_line():
    try:
        raise ZeroDivisionError("never")
    except ZeroDivisionError as error:
        record = logging.makeLogRecord(
            {"msg": "It broke", "levelname": "ERROR", "exc_info": (type(error), error, None)}
        )

    assert "ZeroDivisionError: never" in json.loads(JsonLines().format(record))["error"]


# ── stray lines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lines_of_python_of_c_code_and_of_children_are_heard_and_the_stream_itself_is_still_there(capfd):
    heard: list[str] = []
    with stray_lines(heard.append) as stderr:
        os.write(2, b"from C\n")
        child = [sys.executable, "-c", "import sys; print('from a child', file=sys.stderr)"]
        subprocess.run(tied(child), check=True)
        stderr.write("to the stream\n")
    os.write(2, b"afterwards\n")

    assert heard == ["from C", "from a child"]
    assert capfd.readouterr().err == "to the stream\nafterwards\n"


def test_a_line_is_heard_when_it_is_whole_and_the_last_one_at_the_end():
    heard: list[str] = []
    with stray_lines(heard.append):
        for part in (b"be", b"gun\nand \xff\n\n  \nnot end", b"ed"):
            os.write(2, part)

    assert heard == ["begun", "and \ufffd", "not ended"]


def test_of_a_progress_bar_the_last_state_is_heard():
    heard: list[str] = []
    with stray_lines(heard.append):
        os.write(2, b"\r 10%\r 50%\r100%\nover\r\n")

    assert heard == ["100%", "over"]


def test_an_error_inside_leaves_stderr_as_it_was(capfd):
    heard: list[str] = []
    try:
        with stray_lines(heard.append):
            os.write(2, b"inside\n")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        os.write(2, b"outside\n")

    assert heard == ["inside"]
    assert capfd.readouterr().err == "outside\n"


def test_who_hears_badly_holds_up_nobody_who_writes():
    def deaf(_: str) -> None:
        raise OSError("Broken pipe")

    with stray_lines(deaf):
        for _ in range(100):
            os.write(2, b"x" * 4096 + b"\n")


def test_a_child_that_stays_does_not_keep_it_from_ending():
    heard: list[str] = []
    with stray_lines(heard.append):
        child = subprocess.Popen(tied([sys.executable, "-c", "input()"]), stdin=subprocess.PIPE)
        os.write(2, b"a line\n")
    child.communicate(b"\n", timeout=TIMEOUT_S)

    assert heard == ["a line"]
