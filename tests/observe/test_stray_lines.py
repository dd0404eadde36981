"""Nothing that is written to stderr passes the log by, whoever writes it."""

from __future__ import annotations

import os
import subprocess
import sys

from rota.observe.logs import stray_lines
from rota.runtime.lifeline import tied
from tests.waiting import TIMEOUT_S


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
