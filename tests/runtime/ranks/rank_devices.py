"""Devices of fake ranks; followers import them by name, and a folder carries what a test wants of one rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rota.core.config import EngineConfig, ModelConfig, SchedulerConfig
from rota.core.ids import AdapterId
from rota.core.messages import AdapterReady, Message
from rota.core.plan import StepPlan
from rota.runtime.ranks.lead import Agreement, build_ranks
from rota.runtime.ranks.meeting import Meeting
from rota.runtime.supervisor import SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from tests.fakes import FakeDevice, FakeTicket, alphabet
from tests.runtime.services import SLOW, Heard, heard
from tests.waiting import until


def config_of(size: int, depth: Literal[1, 2] = 2, **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(tensor_parallel_size=size, **model), scheduler=SchedulerConfig(overlap_depth=depth)
    )


def fake_rank(folder: Path, config: EngineConfig, make: Callable[[], FakeDevice] = FakeDevice) -> FakeDevice:
    """Leaves its process's id in the folder, in one step: a test may read it while a rank is started again."""
    note = _note_of(folder, config.rank, config.engine_id)
    unread = note.with_name(f"{note.name}, {os.getpid()}")
    unread.write_text(str(os.getpid()))
    unread.replace(note)
    return make()


def spelling_rank(folder: Path, config: EngineConfig) -> FakeDevice:
    return replace(fake_rank(folder, config), next_token=alphabet)


slow_rank = partial(fake_rank, make=SLOW)


def listening_at(pid: int) -> set[str]:
    """The addresses where a process takes connections, as Linux writes them: 0100007F is 127.0.0.1."""
    own = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {words[1].split(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in own}


def pid_of(folder: Path, rank: int, replica: int = 0) -> int:
    """Of the newest process of this rank."""
    return int(_note_of(folder, rank, replica).read_text())


def _note_of(folder: Path, rank: int, replica: int) -> Path:
    return folder / f"rank{rank} of replica{replica}"


def supervised_ranks(
    make_device: Callable[[EngineConfig], Any],
    size: int = 2,
    timeouts: EngineTimeouts | None = None,
    rank_timeouts: EngineTimeouts | None = None,
    depth: Literal[1, 2] = 2,
) -> Heard:
    config = config_of(size, depth)
    return heard(SupervisedService(partial(build_ranks, make_device, config, rank_timeouts), config, timeouts))


class LateCopies(FakeDevice):
    """Tells of a read or a copy once the file `open` is there, and fails on a copy that is used before."""

    folder: Path
    complete: set[AdapterId]

    def submit(self, plan: StepPlan) -> FakeTicket:
        post = self._post
        self._post = self._tell_later(post) if post else None
        used = {self._rows[row].adapter_id for row in plan.decodes} | {
            seat.adapter_id for seat in plan.seats for chunk in plan.chunks if chunk.row == seat.row
        }
        assert used - {0} <= self.complete, f"a copy of {used} is used before it is complete"
        try:
            return super().submit(plan)
        finally:
            self._post = post

    def _tell_later(self, post: Callable[[Message], None]) -> Callable[[Message], None]:
        def tell(message: Message) -> None:
            until((self.folder / "open").exists)
            if isinstance(message, AdapterReady):
                self.complete.add(message.adapter_id)
            post(message)

        return lambda message: threading.Thread(target=tell, args=(message,), daemon=True).start()


def late_follower(folder: Path, config: EngineConfig) -> FakeDevice:
    if config.rank == 0:
        return slow_rank(folder, config)
    device = LateCopies(**SLOW.keywords)
    device.folder, device.complete = folder, set()
    return device


class PickyFollower(FakeDevice):
    """Cannot read an adapter whose name says "picky", though rank 0 can; counts what it was told to drop."""

    def fetch(self, adapter: Any) -> Message:
        return super().fetch(replace(adapter, path="broken") if "picky" in adapter.name else adapter)


def picky_follower(folder: Path, config: EngineConfig) -> FakeDevice:
    return PickyFollower() if config.rank else DropNotes(folder)


class DropNotes(FakeDevice):
    """Writes down which adapters were dropped."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def submit(self, plan: StepPlan) -> FakeTicket:
        with (self.folder / "drops").open("a") as file:
            file.writelines(f"{adapter_id}\n" for adapter_id in plan.drops)
        return super().submit(plan)


@dataclass(frozen=True)
class Refusal:
    """A rank that cannot be built."""

    rank: int
    error: type[Exception]
    words: str

    def __call__(self, config: EngineConfig) -> FakeDevice:
        if config.rank == self.rank:
            raise self.error(self.words)
        return FakeDevice()


def hasty_leader(folder: Path, config: EngineConfig) -> FakeDevice:
    """Rank 0 alone decides when an adapter is there; what it asks of the others is too early."""

    def note(self: Agreement, rank: int, message: Message) -> None:
        if rank == 0 and self._post:
            self._post(message)

    if config.rank == 0:
        Agreement.note = note  # type: ignore[method-assign]
    return late_follower(folder, config)


class ServiceTask(FakeDevice):
    """Fails at its third step, because rank 2 is killed there."""

    folder: Path

    def submit(self, plan: StepPlan) -> FakeTicket:
        if len(self.plans) == 2:
            os.kill(pid_of(self.folder, 2), signal.SIGKILL)
            raise ConnectionError("Connection closed by peer")
        return super().submit(plan)


def service_tasks(folder: Path, config: EngineConfig) -> FakeDevice:
    """Rank 1 fails for lack of rank 2, once."""
    device = slow_rank(folder, config)
    if config.rank == 1 and not (folder / "failed").exists():
        (folder / "failed").touch()
        device = ServiceTask(**SLOW.keywords)
        device.folder = folder
    return device


def gapped_leader(folder: Path, config: EngineConfig) -> FakeDevice:
    """The first leader of a test loses its fourth plan on the way."""
    lost = folder / "lost"
    send_plan = Meeting.send_plan

    def send_all_but_the_fourth(self: Meeting, plan: StepPlan) -> None:
        if self._number == 3 and not lost.exists():
            lost.touch()
            self._number += 1
        else:
            send_plan(self, plan)

    if config.rank == 0:
        Meeting.send_plan = send_all_but_the_fourth  # type: ignore[method-assign]
    return SLOW()


class Unreadable:
    """A function that the engine's process can read and a follower cannot."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_unless_follower, ()

    def __call__(self, config: EngineConfig) -> FakeDevice:
        raise AssertionError("no rank is built")


def _read_unless_follower() -> Unreadable:
    if "rota.runtime.ranks" in sys.orig_argv:
        raise ImportError("not here")
    return Unreadable()
