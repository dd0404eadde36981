"""On a GPU two ranks answer as one does, in graphs and with adapters; both are on one device, where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.engine.parallel.ranks import started_ranks
from tests.engine.parallel.story import ADAPTERS, GroupServer, asked, play

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

# Two processes on one device, which have no multicast. NCCL refuses them: sums here are small, and do without.
ON_ONE_DEVICE = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
NEW_TOKENS = 14


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with started_ranks(2, tmp_path_factory.mktemp("two"), **ON_ONE_DEVICE) as ranks:
        yield ranks


@pytest.mark.parametrize("family", ["llama3", "qwen3", "olmo2"])
def test_two_ranks_on_one_device_answer_as_one_does(family, two, tmp_path):
    """In float32: in bfloat16 a sum of two rounded parts is not the rounded sum, and near ties fall otherwise."""
    model = make_tiny_model(tmp_path / "model", family)
    for number in range(1, ADAPTERS + 1):
        make_adapter(tmp_path / str(number), model, seed=number, r=2 * number)
    told = [
        play(GroupServer(tmp_path / "model", ranks, device="cuda"), tmp_path, asked(NEW_TOKENS))
        for ranks in (None, two)
    ]

    assert told[1].tokens == told[0].tokens
    assert told[1].failures == 0
    for id, scores in told[0].scores.items():
        assert [one.chosen for one in told[1].scores[id]] == pytest.approx([one.chosen for one in scores], abs=1e-2)


def test_bfloat16_ranks_agree_with_each_other(two, tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(tmp_path / str(number), model, seed=number, r=2 * number)
    server = GroupServer(tmp_path / "model", two, device="cuda", dtype="bfloat16")

    assert play(server, tmp_path, asked(NEW_TOKENS)).failures == 0
