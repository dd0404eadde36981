from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks.chaos.asks import Ask, Manner, drawn_ask
from benchmarks.chaos.deck import Deck
from benchmarks.chaos.endings import Ending, Form, Kind, Received, read_ending
from benchmarks.chaos.faults import FAULTS, Ends
from benchmarks.chaos.invariants import Sample
from benchmarks.chaos.ledger import Allowed, problem_with
from benchmarks.chaos.memory import growth_of, problems_with
from benchmarks.chaos.processes import Held
from tests.processes import marked, run_program

ROOT = Path(__file__).parents[2]
# One of every sort that a minute has time for: processes die, a disk fills, a folder changes, clients leave and abort.
SHORT = ("engine killed", "server killed", "disk full", "folder spoiled", "leaving clients", "aborts")


@pytest.mark.long(
    "Servers and engines start again and again, and are judged by the clock: on a busy machine they are late."
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_short_run_breaks_no_promise_and_leaves_no_process(tmp_path, replicas):
    mark = f"CHAOS_{os.getpid()}_{tmp_path.name}"
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--seed", "7", "--requests", "3", "--json", report]
    options = ["--rounds", str(len(SHORT)), "--faults", ",".join(SHORT), "--replicas", str(replicas)]
    done = run_program([*command, *options], check=False, cwd=ROOT, env=os.environ | {mark: "1"})

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text("utf-8"))
    assert (found["replicas"], set(found["faults"])) == (replicas, set(SHORT))
    assert found["requests"]["sent"] == found["requests"]["ended"] > 3 * len(SHORT)
    assert found["violations"] == []
    assert marked(mark) == []


def stream(*events: object, last: bytes = b"data: [DONE]\n\n") -> Received:
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return Received(status=200, body=body + last, is_stream=True, is_complete=True)


def choice(reason: str | None = None, index: int = 0) -> dict[str, object]:
    return {"choices": [{"index": index, "text": "a", "finish_reason": reason}]}


def error(code: str) -> dict[str, object]:
    return {"error": {"message": "No.", "type": "server_error", "param": None, "code": code}}


def kind_of(received: Received, choices: int = 1) -> Kind:
    return read_ending(received, Form.OPENAI, choices).kind


def test_a_stream_with_one_end_for_every_choice_is_finished():
    assert kind_of(stream(choice(), choice("length"))) is Kind.FINISHED
    assert kind_of(stream(choice("length"), choice("stop", 1)), choices=2) is Kind.FINISHED


@pytest.mark.parametrize(
    "received",
    [
        stream(choice()),
        stream(choice("length"), last=b""),
        stream(choice("length"), last=b"data: [DONE]\n\ndata: [DONE]\n\n"),
        stream(choice("length"), choice("length")),
        stream(choice("length"), choice()),
        stream(error("engine_died"), choice()),
        stream(error("no_such_code")),
        Received(status=500, body=json.dumps(error("not_a_number")).encode(), is_complete=True),
        Received(status=418, body=b"{}", is_complete=True),
    ],
)
def test_a_stream_that_ends_twice_or_never_or_with_an_unknown_error_is_broken(received):
    assert kind_of(received) is Kind.BROKEN


def test_an_answer_that_stops_in_the_middle_is_cut():
    assert kind_of(Received(status=200, body=b"data: {}", is_stream=True)) is Kind.CUT
    assert kind_of(Received()) is Kind.CUT


def test_an_error_with_a_documented_code_is_a_refusal_before_and_in_a_stream():
    refused = read_ending(stream(choice(), error("engine_died")), Form.OPENAI, 1)

    assert (refused.kind, refused.status, refused.outcome) == (Kind.REFUSED, 503, "503 engine_died in a stream")
    body = json.dumps(error("queue_full")).encode()
    assert read_ending(Received(429, body, is_complete=True), Form.OPENAI, 1).outcome == "429 queue_full"


@pytest.mark.parametrize(
    ("ending", "allowed", "is_right"),
    [
        (Ending(Kind.FINISHED, "length", 200), Allowed(), True),
        (Ending(Kind.FINISHED, "abort", 200), Allowed(), False),
        (Ending(Kind.FINISHED, "abort", 200), Allowed(abort=True), True),
        (Ending(Kind.REFUSED, "503 engine_died", 503), Allowed(), False),
        (Ending(Kind.REFUSED, "503 engine_died", 503), Allowed(frozenset({503})), True),
        (Ending(Kind.CUT, "cut"), Allowed(), False),
        (Ending(Kind.CUT, "cut"), Allowed(cut=True), True),
        (Ending(Kind.LEFT, "left"), Allowed(), False),
        (Ending(Kind.LATE, "late"), Allowed(frozenset({503}), True, True), False),
    ],
)
def test_an_ending_is_right_only_if_the_rounds_fault_explains_it(ending, allowed, is_right):
    assert (problem_with(Ask("/generate"), ending, allowed) == "") == is_right


def test_a_client_that_was_drawn_to_leave_may_leave():
    assert problem_with(Ask("/generate", manner=Manner(leaves_after=0)), Ending(Kind.LEFT, "left"), Allowed()) == ""


def test_the_same_seed_draws_the_same_faults_and_the_same_requests():
    decks = [Deck(Random(seed)) for seed in (3, 3, 4)]
    first, second, other = ([deck.deal(0.0).name for _ in range(40)] for deck in decks)

    assert first == second != other
    assert drawn_ask(Random(3), "key", "base") == drawn_ask(Random(3), "key", "base")


def test_a_deck_deals_every_fault_equally_often_and_spares_processes_towards_the_end():
    deck = Deck(Random(1))

    assert sorted(deck.deal(0.0).name for _ in FAULTS) == sorted(FAULTS)
    assert {deck.deal(0.4).ends for _ in range(60)} == {Ends.NOTHING, Ends.ENGINE}
    assert {deck.deal(0.9).ends for _ in range(60)} == {Ends.NOTHING}


def lives(*sizes: tuple[int, float]) -> list[Sample]:
    """One sample a minute: the engine's process and what it holds."""
    server = Held(1, 100.0, 10, 5)
    return [
        Sample(number, 60.0 * number, server, Held(pid, size, 10, 5), 2) for number, (pid, size) in enumerate(sizes)
    ]


def test_memory_is_compared_within_the_longest_life_and_after_its_warm_up():
    samples = lives((7, 900.0), (7, 950.0), *((8, 500.0 + 50.0 * min(minute, 4)) for minute in range(20)))
    growth = growth_of(samples, "engine")

    assert (growth.samples, growth.first_mb, growth.last_mb) == (20, 700.0, 700.0)
    assert growth.is_judged
    assert problems_with({"engine": growth}) == []


def test_memory_that_grows_to_the_end_is_a_problem():
    growth = growth_of(lives(*((8, 500.0 + 10.0 * minute) for minute in range(20))), "engine")

    assert len(problems_with({"engine": growth})) == 1


def test_a_life_that_is_mostly_warm_up_is_not_judged():
    growth = growth_of(lives(*((8, 500.0 + 100.0 * minute) for minute in range(4))), "engine")

    assert not growth.is_judged
    assert problems_with({"engine": growth}) == []
