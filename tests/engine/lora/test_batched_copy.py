"""A batched copy moves the same bytes to the same places as the copies one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.core.ids import Slot
from rota.engine.lora import bank, copies
from rota.engine.lora.bank import Bank
from rota.engine.lora.copies import can_batch, copy_stretches, cut_stretches
from rota.engine.model.sites import SITES
from tests.engine.lora.small_bank import CPU, MAX_RANK, SMALL, assert_equal, copy_within_the_host, host_adapter

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(targets=sizes, cuts=st.sets(st.integers(1, 100)))
def test_every_byte_is_copied_once_and_in_order(targets: list[int], cuts: set[int]) -> None:
    total = sum(targets)
    ends = [*sorted(cut for cut in cuts if cut < total), total]
    sources = [(1000 + begin, end - begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    starts = [sum(targets[:index]) * 2 for index in range(len(targets))]  # with gaps between the targets
    copies = cut_stretches(np.array(list(zip(starts, targets, strict=True))), np.array(sources)).T.tolist()
    read = [byte for _, source, size in copies for byte in range(source, source + size)]
    written = [byte for target, _, size in copies for byte in range(target, target + size)]
    assert read == list(range(1000, 1000 + total))
    assert written == [byte for start, size in zip(starts, targets, strict=True) for byte in range(start, start + size)]


def test_a_run_of_another_length_is_never_copied() -> None:
    with pytest.raises(AssertionError, match="same bytes"):
        cut_stretches(np.array([(0, 4)]), np.array([(8, 3)]))


def test_a_cpu_copies_without_the_driver() -> None:
    assert not can_batch(torch.device("cpu"))


@pytest.mark.parametrize("ranks", [(MAX_RANK,) * len(SITES), (2, 0, MAX_RANK, 3)])
def test_a_slot_holds_the_same_after_a_batched_copy(ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    copy_within_the_host(monkeypatch)
    one_by_one = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU)
    monkeypatch.setattr(bank, "can_batch", lambda _: True)
    batched = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU)
    for each in (one_by_one, batched):
        for fill in (1.0, 2.0, 3.0):  # the third copy finds the addresses of the first
            each.copy_in(Slot(1), host_adapter(ranks, fill))
    assert_equal(batched, one_by_one)


def test_a_refused_batch_is_an_error_with_the_drivers_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_driver_call", lambda: lambda *_: 719)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    with pytest.raises(RuntimeError, match="error 719"):
        copy_stretches(np.array([(0, 4)]), np.array([(8, 4)]))
