from __future__ import annotations

import pytest

from rota.core.errors import ConfigError
from rota.runtime.ranks.processes import torchrun_place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first.example",
    "MASTER_PORT": "29400",
}


def test_torchruns_environment_says_which_rank_a_process_is_and_where_rank_0_waits():
    place = torchrun_place(4, TORCHRUN)

    assert (place.rank, place.device_number, place.local_ranks) == (3, 1, 2)
    assert place.address == "tcp://first.example:29401"  # torchrun itself listens on MASTER_PORT


@pytest.mark.parametrize(("size", "environ"), [(1, TORCHRUN), (4, {}), (4, {"RANK": "0"}), (4, {"WORLD_SIZE": "4"})])
def test_without_torchrun_or_with_one_device_there_is_no_such_place(size, environ):
    assert torchrun_place(size, environ) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"WORLD_SIZE": "8"}, "tensor_parallel_size is 4, but WORLD_SIZE is 8: start 4 processes, or unset RANK"),
        ({"RANK": "first"}, "RANK must be a whole number, not 'first'"),
        ({"MASTER_PORT": ""}, "RANK and WORLD_SIZE are set, but MASTER_PORT is not"),
        ({"MASTER_ADDR": ""}, "RANK and WORLD_SIZE are set, but MASTER_ADDR is not"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_with_a_sentence(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        torchrun_place(4, {**TORCHRUN, **change})
