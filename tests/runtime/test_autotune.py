"""An engine's autotune results reach the next engine, unless that engine died so soon that one of them may be why."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from rota.core.config import EngineConfig
from rota.core.stages import AutotuneResult, Stage
from rota.runtime.timeouts import EngineTimeouts
from rota.start import START
from tests.fakes import FakeDevice
from tests.runtime.ranks.rank_devices import supervised_ranks
from tests.runtime.services import supervised
from tests.waiting import TIMEOUT_S, until


def build_trying() -> FakeDevice:
    """A device that makes one trial more than it knew, and says in its stages what it knew."""
    known = START.autotuned
    START.autotuned = (*known, AutotuneResult(f"trial {len(known)}", (len(known),)))
    return FakeDevice(stages=tuple(Stage(result.name, float(result.choice[0]), 1.0) for result in known))


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_next_engine_knows_them_unless_the_last_died_quickly(is_quick):
    timeouts = EngineTimeouts(quick_death_s=1000.0 if is_quick else 0.0)
    with supervised(build_trying, timeouts) as (service, _):
        for deaths in (1,) if is_quick else (1, 2):
            service.wait_until_ready(TIMEOUT_S)
            before = service.engine_pid
            os.kill(before, signal.SIGKILL)
            assert until(lambda before=before: service.state.capacity and service.state.engine_pid != before)
            known = [] if is_quick else [f"trial {number}" for number in range(deaths)]
            assert [stage.name for stage in service.state.restart] == known
        assert service.state.start == ()


def build_noting(folder: Path, config: EngineConfig) -> FakeDevice:
    """A rank that writes down how many autotune results it knew."""
    note = folder / f"rank {config.rank}"
    note.write_text((note.read_text() if note.exists() else "") + str(len(START.autotuned)))
    START.autotuned = (AutotuneResult("trial", (1,)),)
    return FakeDevice()


def test_all_ranks_of_the_next_engine_know_them(tmp_path):
    with supervised_ranks(partial(build_noting, tmp_path), timeouts=EngineTimeouts(quick_death_s=0.0)) as (service, _):
        service.wait_until_ready(TIMEOUT_S)
        os.kill(service.engine_pid, signal.SIGKILL)
        assert until(lambda: [note.read_text() for note in tmp_path.iterdir()] == ["01", "01"])
