"""A rank that torchrun has started follows rank 0 through all restarts, until rank 0 ends."""

from __future__ import annotations

from dataclasses import replace

from rota.core.config import EngineConfig
from rota.core.errors import EngineLostError
from rota.runtime.ranks.follower import REFUSED, STOPPED
from rota.runtime.ranks.meeting import MEET_S
from rota.runtime.ranks.place import Place
from rota.runtime.ranks.processes import FollowerProcess, Job
from rota.runtime.ranks.records import MakeDevice

# Rank 0 starts its engine again within seconds of its end, but may wait for the silence of a rank before that.
AGAIN_S = 60.0


def attend(make_device: MakeDevice, config: EngineConfig, place: Place, again_s: float = AGAIN_S) -> None:
    """Returns when rank 0 has stopped; raises when rank 0 does not come back or wants nothing of this rank.

    Each life is a process of its own: a device that has lost its group cannot join another.
    """
    config = replace(config, rank=place.rank, device_number=place.device_number, local_ranks=place.local_ranks)
    job = Job(make_device=make_device, config=config, address=place.address, meet_s=MEET_S)
    while (code := FollowerProcess(job).wait()) != STOPPED:
        if code == REFUSED:
            raise EngineLostError(f"Rank {place.rank} does not follow rank 0 any more.")
        job = replace(job, meet_s=again_s)
