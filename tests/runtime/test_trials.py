"""An engine's trials reach the next engine, unless that engine died so soon that one of them may be why."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from rota.core.config import EngineConfig
from rota.core.stages import Stage, Trial
from rota.runtime.patience import Patience
from rota.runtime.start import known_trials, tell_trials
from tests.fakes import FakeDevice
from tests.runtime.ranks.rank_devices import supervised_ranks
from tests.runtime.services import supervised
from tests.waiting import PATIENCE_S, until


def build_trying() -> FakeDevice:
    """A device that makes one trial more than it knew, and says in its stages what it knew."""
    known = known_trials()
    tell_trials((*known, Trial(f"trial {len(known)}", (len(known),))))
    return FakeDevice(stages=tuple(Stage(trial.name, float(trial.choice[0]), 1.0) for trial in known))


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_next_engine_knows_them_unless_the_last_died_quickly(is_quick):
    patience = Patience(quick_death_s=1000.0 if is_quick else 0.0)
    with supervised(build_trying, patience) as (service, _):
        for deaths in (1,) if is_quick else (1, 2):
            service.wait_until_ready(PATIENCE_S)
            before = service.engine_pid
            os.kill(before, signal.SIGKILL)
            assert until(lambda before=before: service.state.capacity and service.state.engine_pid != before)
            known = [] if is_quick else [f"trial {number}" for number in range(deaths)]
            assert [stage.name for stage in service.state.restart] == known
        assert service.state.start == ()


def build_noting(folder: Path, config: EngineConfig) -> FakeDevice:
    """A rank that writes down how many trials it knew."""
    note = folder / f"rank {config.rank}"
    note.write_text((note.read_text() if note.exists() else "") + str(len(known_trials())))
    tell_trials((Trial("trial", (1,)),))
    return FakeDevice()


def test_all_ranks_of_the_next_engine_know_them(tmp_path):
    with supervised_ranks(partial(build_noting, tmp_path), patience=Patience(quick_death_s=0.0)) as (service, _):
        service.wait_until_ready(PATIENCE_S)
        os.kill(service.engine_pid, signal.SIGKILL)
        assert until(lambda: [note.read_text() for note in tmp_path.iterdir()] == ["01", "01"])
