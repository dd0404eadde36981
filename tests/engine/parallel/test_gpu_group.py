"""What ranks on GPUs make of one-shot sums, with sums between threads in their place; NCCL's part is played too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rota.engine.parallel import gpu_group
from rota.engine.parallel.gpu_group import GPUGroup
from rota.engine.parallel.group import RankGroup
from tests.engine.parallel.together import together


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The sums that NCCL was asked for."""
    asked: list[str] = []

    monkeypatch.setattr(dist, "new_group", lambda backend: backend)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: asked.append("sum"))
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *_, **__: asked.append("gather"))
    return asked


def on_two(part: Callable[[GPUGroup], Tensor]) -> list[Tensor]:
    def on_rank(threads: RankGroup) -> Tensor:
        return part(GPUGroup(threads.rank, threads.size, threads.sum))

    return together(2, on_rank)


def test_small_parts_are_gathered_by_a_sum_also_those_that_are_no_numbers(ran):
    parts = torch.tensor([[1.0, float("nan"), -float("inf")], [float("inf"), 0.0, 2.5]])

    for gathered in on_two(lambda group: group.gather(parts[group.rank])):
        assert torch.equal(gathered.nan_to_num(7.0), parts.nan_to_num(7.0))
    assert ran == []


def test_all_ranks_have_rank_0_s_tokens(ran):
    tokens = torch.tensor([[3, 262_143, 0], [9, 9, 9]])

    assert [given.tolist() for given in on_two(lambda group: group.tokens(tokens[group.rank]))] == [[3, 262_143, 0]] * 2
    assert ran == []


@pytest.mark.parametrize(
    ("numbers", "dtype", "is_small"),
    [
        (64 * 4096, torch.bfloat16, True),
        (gpu_group.ONE_SHOT_BYTES // 4, torch.float32, True),
        (gpu_group.ONE_SHOT_BYTES // 4 + 1, torch.float32, False),
        (8, torch.float16, False),
        (9, torch.bfloat16, False),
    ],
)
def test_nccl_adds_what_is_large_or_of_a_precision_that_the_kernel_does_not_add(numbers, dtype, is_small, ran):
    on_two(lambda group: group.sum(torch.ones(numbers, dtype=dtype)))

    assert ran == ([] if is_small else ["sum", "sum"])


def test_a_gather_is_small_only_if_all_parts_are_so_together(ran):
    on_two(lambda group: group.gather(torch.ones(gpu_group.ONE_SHOT_BYTES // 8)))
    assert ran == []

    on_two(lambda group: group.gather(torch.ones(gpu_group.ONE_SHOT_BYTES // 8 + 1)))
    assert ran == ["gather", "gather"]


def test_gpus_that_do_not_see_each_other_leave_all_sums_to_nccl(ran):
    group = GPUGroup(0, 2, one_shot=None)
    group.sum(torch.ones(2))
    group.gather(torch.ones(2))
    group.tokens(torch.ones(2, dtype=torch.int64))

    assert ran == ["sum", "gather", "sum"]


@pytest.mark.parametrize(
    ("places", "can_reach", "sees"),
    [
        ([("here", 0), ("here", 1)], {1}, True),
        ([("here", 0), ("here", 1)], set(), False),
        ([("here", 0), ("there", 1)], {1}, False),
        ([("here", 0), ("here", 0)], set(), True),  # two ranks on one GPU, in tests
    ],
)
def test_only_gpus_of_one_machine_that_reach_each_other_add_up_in_memory(places, can_reach, sees, monkeypatch):
    def gather(given: list[tuple[str, int]], own: tuple[str, int]) -> None:
        assert own == places[0]
        given[:] = places

    monkeypatch.setattr(gpu_group.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(gpu_group, "least_of", int)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other: other in can_reach)

    assert gpu_group.see_each_other(2, torch.device("cuda", 0)) == sees
