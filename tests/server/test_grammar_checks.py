"""Grammars are checked in processes of their own: once each, in time, and fairly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.grammar import Grammar
from rota.grammar import texts
from rota.runtime.room.job import Kind, QueueBounds
from rota.server.access.keys import ANYONE
from rota.server.calls.reading_room import GRAMMAR, ReadingRoom
from tests.processes import is_alive
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

# For what is stopped and will never come; whoever is not stopped is not held up for as long.
SHORT_S = 5.0
GOOD = texts.choice(["yes", "no"], "guided_choice")
BAD = texts.regex("(a", "guided_regex")
OVERDUE = f"The check of a grammar took longer than {SHORT_S:g} seconds; try again, or make the grammar smaller."
DIED = "The check of a grammar ended with the process that made it; try again, or make the grammar smaller."
TOO_SLOW = f"it takes more than {GRAMMAR.cpu_s:g} seconds of processor time to read. Make it smaller."


def patient(**limits: Any) -> Kind:
    """A check may take long by the clock, however busy the machine is."""
    return replace(GRAMMAR, **{"wall_s": TIMEOUT_S, **limits})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


def run(folder: Path, test: Callable[[ReadingRoom], Awaitable[None]], **options: Any) -> None:
    """Runs a test on an event loop, with processes that end with it."""

    async def body() -> None:
        checks = ReadingRoom(folder, **options)
        try:
            await asyncio.wait_for(test(checks), TIMEOUT_S)
        finally:
            pids = checks.pids
            await checks.close()
            assert not any(map(is_alive, pids))

    asyncio.run(body())


async def refused(checks: ReadingRoom, grammar: Grammar, key: str = ANYONE.name) -> str:
    """The sentence of a refusal; empty if the grammar is taken."""
    fault = await fault_of(checks, lambda: grammar, key)
    return fault.message if fault else ""


async def fault_of(checks: ReadingRoom, make: Callable[[], Grammar], key: str = ANYONE.name) -> Fault | None:
    try:
        await checks.check(make(), key)
    except RequestError as error:
        return error.fault
    return None


def one_of(*options: str) -> Grammar:
    return texts.choice(options, "guided_choice")


def test_a_grammar_is_taken_or_refused_with_its_field_and_checked_once(folder: Path):
    async def test(checks: ReadingRoom) -> None:
        assert await asyncio.gather(*(refused(checks, GOOD) for _ in range(50))) == [""] * 50
        sentence = await refused(checks, BAD)
        assert sentence.startswith("guided_regex cannot be followed: invalid regex")
        for pid in checks.pids:
            os.kill(pid, signal.SIGSTOP)  # nobody could check it again
        assert [await refused(checks, grammar) for grammar in (GOOD, BAD)] == ["", sentence]
        assert await refused(checks, texts.choice(["yes", "no"], "another field")) == ""

    # One may wait: those who ask about one grammar wait for one check.
    run(folder, test, processes=1, grammar=patient(of_key=QueueBounds(1, 10**6)))


def test_many_grammars_cannot_pile_up_and_another_key_has_its_turn(folder: Path):
    async def test(checks: ReadingRoom) -> None:
        assert await refused(checks, BAD) != ""  # the process is ready
        flood = [asyncio.create_task(refused(checks, one_of(str(count)), "acme")) for count in range(10)]
        await asyncio.sleep(0)  # they have all asked
        assert await refused(checks, GOOD, "other") == ""
        outcomes = await asyncio.gather(*flood)
        # Two may wait, and a third is checked if the process has taken it before the next one came.
        assert outcomes.count("") in (2, 3)
        assert outcomes.count("Too many grammars wait to be read; try again in a second.") == 10 - outcomes.count("")

    # One is being checked, and two wait.
    run(folder, test, processes=1, grammar=patient(of_key=QueueBounds(2, 10**6)))


def copy_of(pid: int) -> int:
    """The process in which a process checks grammars."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def test_a_check_that_hangs_is_ended_and_the_next_finds_a_new_copy(folder: Path):
    async def test(checks: ReadingRoom) -> None:
        assert await refused(checks, GOOD) == ""
        (pid,) = checks.pids
        hung = copy_of(pid)
        os.kill(hung, signal.SIGSTOP)
        assert await refused(checks, one_of("a")) == OVERDUE
        assert not is_alive(hung)
        assert await refused(checks, one_of("a")) == ""
        assert checks.pids == [pid]

    run(folder, test, processes=1, grammar=patient(wall_s=SHORT_S))


def test_a_copy_or_a_process_that_dies_takes_only_its_grammar_with_it(folder: Path):
    async def test(checks: ReadingRoom) -> None:
        assert await refused(checks, GOOD) == ""
        (pid,) = checks.pids
        os.kill(copy_of(pid), signal.SIGABRT)  # as the library does when memory ends
        assert await refused(checks, one_of("a")) == DIED
        assert await refused(checks, one_of("a")) == ""
        assert checks.pids == [pid]

        copy = copy_of(pid)
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.to_thread(until, lambda: not is_alive(copy))
        assert await refused(checks, one_of("b")) == DIED
        assert await refused(checks, one_of("b")) == ""

    run(folder, test, processes=1)


def test_a_process_that_is_stuck_is_replaced_and_others_go_on(folder: Path):
    async def test(checks: ReadingRoom) -> None:
        await asyncio.gather(refused(checks, one_of("a")), refused(checks, one_of("b")))
        assert await asyncio.to_thread(until, lambda: len(checks.pids) == 2)
        stuck, healthy = checks.pids
        os.kill(stuck, signal.SIGSTOP)
        sentences, numbers = list[str](), count()
        while DIED not in sentences:  # the process that is well may be quick enough for all of them
            sentences += await asyncio.gather(*(refused(checks, one_of(str(next(numbers)))) for _ in range(4)))
        assert sorted({*sentences}) == ["", DIED]
        assert sentences.count(DIED) == 1
        assert not is_alive(stuck)
        assert await asyncio.to_thread(until, lambda: len(set(checks.pids) - {stuck}) == 2)
        assert healthy in checks.pids
        assert [await refused(checks, one_of(name)) for name in "cdef"] == [""] * 4

    run(folder, test, processes=2, grammar=patient(wall_s=SHORT_S))


def test_who_waits_while_the_server_stops_is_told_so(folder: Path):
    async def test(checks: ReadingRoom) -> None:
        asked = [asyncio.create_task(refused(checks, one_of(str(count)))) for count in range(3)]
        await asyncio.sleep(0)
        await checks.close()
        assert await asyncio.gather(*asked) == ["The server is stopping and takes no more requests."] * 3

    run(folder, test, processes=1)


def test_a_model_without_an_end_token_follows_no_grammar(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")

    async def test(checks: ReadingRoom) -> None:
        for _ in range(2):
            assert "names no token that ends an answer" in await refused(checks, GOOD)

    run(tmp_path, test)


def deep(levels: int) -> dict[str, Any]:
    names = [f"d{level}" for level in range(levels)]
    following = zip(names, [*names[1:], "end"], strict=True)
    twice = {
        name: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{after}"}, "b": {"$ref": f"#/$defs/{after}"}}}
        for name, after in following
    }
    return {"$ref": "#/$defs/d0", "$defs": {**twice, "end": {"type": "null"}}}


TWO = [{"properties": {name: {"const": 1}}, "required": [name]} for name in "ab"]
HOSTILE: dict[str, Callable[[], Grammar]] = {
    "nested repetition": lambda: texts.regex("((((a{0,99}b){0,99}c){0,99}d){0,99}e){0,99}f", "p"),
    "a million times": lambda: texts.regex("[xy]a{1000000}", "p"),
    "a million alternatives": lambda: texts.regex("|".join(map(str, range(10**6))), "p"),
    "a thousand alternatives of many": lambda: texts.regex("(" + "|".join(map(str, range(2000))) + "){99}{99}", "p"),
    "remembers much": lambda: texts.regex(".*a.{200}(b|.*c.{200})", "p"),
    "letters of all languages": lambda: texts.regex(r"(\p{L}{1,60}\s?){1,60}", "p"),
    "enormous enum": lambda: texts.json_schema({"enum": [f"option {count}" for count in range(6000)]}, "p"),
    "enormous text": lambda: texts.json_schema({"const": "a" * 10**5}, "p"),
    "many properties": lambda: texts.json_schema({"properties": {f"name {count}": {} for count in range(3000)}}, "p"),
    "references in two to the thirtieth ways": lambda: texts.json_schema(deep(30), "p"),
    "references two thousand deep": lambda: texts.json_schema(deep(500), "p"),
    "products of unions": lambda: texts.json_schema({"allOf": [{"anyOf": TWO}] * 24}, "p"),
    "many digits": lambda: texts.json_schema({"type": "integer", "multipleOf": 999983}, "p"),
    "many items": lambda: texts.json_schema({"type": "array", "items": deep(5), "minItems": 10**6}, "p"),
    "contradiction": lambda: texts.json_schema({"type": "integer", "minimum": 2, "maximum": 1}, "p"),
    "endless": lambda: texts.json_schema({"$ref": "#"}, "p"),
    "ambiguous": lambda: texts.ebnf('root ::= root root root | "a" root | "a"', "p"),
    "left recursion": lambda: texts.ebnf('root ::= root "a" | ""', "p"),
    "letter by letter": lambda: texts.ebnf('root ::= "a" root', "p"),
}


def test_hostile_and_costly_grammars_are_done_with_after_little_processor_time(folder: Path):
    """Taken or refused: in both cases before the time is up, and the next grammar finds the process ready."""

    async def test(checks: ReadingRoom) -> None:
        await refused(checks, GOOD)
        pids = checks.pids
        for name, make in HOSTILE.items():
            fault = await fault_of(checks, make)
            assert fault is None or (fault.code, fault.param) == (FaultCode.BAD_FIELD, "p"), name
            assert fault is None or "it took longer than" not in fault.message, name
            assert await refused(checks, one_of(name)) == "", name
        for number in range(3):  # each of them ends a copy, and no later one waits for a process to start
            schema = {"type": "integer", "multipleOf": 999983, "title": str(number)}
            assert TOO_SLOW in await refused(checks, texts.json_schema(schema, "p"))
        assert checks.pids == pids

    run(folder, test, processes=1)
