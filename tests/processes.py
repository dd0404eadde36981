"""Programs that tests start: each ends with the test run, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rota.runtime.lifeline import tied

Command = Sequence[str | Path]
Program = subprocess.Popen[str]
Done = subprocess.CompletedProcess[str]
PIPE = subprocess.PIPE


def run_program(command: Command, check: bool = True, **options: Any) -> Done:
    """Waits for a program to end and keeps what it says; with `check`, a program that fails fails the test."""
    done = subprocess.run(tied(command), capture_output=True, text=True, **options)
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done


@contextmanager
def started(command: Command, **options: Any) -> Iterator[Program]:
    """A program in a process group of its own, its output in a pipe; with the block the whole group ends.

    The thread that starts it must live as long as the program, which Linux kills with that thread.
    """
    pipe = {"stdout": PIPE, "text": True}
    with subprocess.Popen(tied(command), start_new_session=True, **(pipe | options)) as program:
        try:
            yield program
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """A zombie is dead: there may be no process left to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def marked(mark: str) -> list[int]:
    """The processes with this word in their environment, which every child of theirs inherits."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if is_alive(pid)]
