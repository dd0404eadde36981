"""On a GPU a packed adapter lies in its slot as if the host had put it together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rota.core.ids import Slot
from rota.engine.lora.bank import Bank
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.workspace import pinning_workspace
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import EVERYTHING, change_dtype, make_adapter
from tests.engine.lora.small_bank import assert_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

MAX_RANK = 16


def copy_in(bank: Bank, folder: Path, spec: ModelSpec, packs: bool) -> None:
    adapter = read_checkpoint(folder, spec, bank.dtype, MAX_RANK, work=pinning_workspace(packs))
    assert (adapter.packing is not None) == packs
    with torch.cuda.stream(torch.cuda.Stream()):  # the driver batches no copies on the default stream
        bank.copy_in(Slot(1), adapter, [4, 1][: bank.pages_of(adapter)])
    torch.cuda.synchronize()


@pytest.mark.parametrize("pages", [0, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("modules", [EVERYTHING, ["q_proj", "v_proj"]], ids=["everything", "some"])
@pytest.mark.parametrize(("rank", "alpha"), [(16, 16), (16, 20), (5, 5), (12, 7)])
def test_a_slot_holds_the_same_whoever_puts_the_factors_there(
    rank, alpha, modules, dtype, pages, model, spec, tmp_path
):
    make_adapter(tmp_path, model, r=rank, lora_alpha=alpha, target_modules=modules)
    change_dtype(tmp_path, dtype)
    device = torch.device("cuda", 0)
    packed, put_together = (Bank(spec, 2, MAX_RANK, dtype, device, pages=pages, unpacks=True) for _ in range(2))
    for bank, packs in ((packed, True), (put_together, False)):
        copy_in(bank, tmp_path, spec, packs)
    assert_equal(packed, put_together)


def test_numbers_in_float32_lie_there_rounded(model, spec, tmp_path):
    make_adapter(tmp_path, model, r=16, lora_alpha=32)
    device = torch.device("cuda", 0)
    packed, put_together = (Bank(spec, 2, MAX_RANK, torch.bfloat16, device, unpacks=True) for _ in range(2))
    for bank, packs in ((packed, True), (put_together, False)):
        copy_in(bank, tmp_path, spec, packs)
    assert_equal(packed, put_together)
