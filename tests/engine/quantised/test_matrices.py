"""A model in four bits answers like the model of its rounded weights, whichever product computes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rota.engine.families.table import read_spec
from rota.engine.parallel.shard import Cut
from rota.engine.quantised.groups import MIDDLE, in_eight_bits, in_four_bits
from rota.engine.quantised.maker import Parts
from rota.engine.quantised.matrices import FEW_ROWS, FourBit, GroupsFile, Kind
from rota.engine.quantised.names import CODES, GROUPS_FILE, MINIMA, SCALES
from rota.engine.weights.load import load_weights
from tests.engine.model.sequence import Sequences
from tests.engine.model_factory import make_tiny_model

KINDS: list[Kind] = ["dynamic", "weight-only"]
PROMPT = torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(5)).tolist()
WEIGHTS = "model.safetensors"


def is_rounded(name: str) -> bool:
    return name.endswith("proj.weight")


def make_rounded_model(folder: Path, family: str) -> None:
    """A tiny model whose layers four bits can hold, its sizes such that they may."""
    make_tiny_model(folder, family, intermediate_size=96)
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {name: in_four_bits(one).weights() if is_rounded(name) else one for name, one in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


@torch.inference_mode()
def expected_logits(folder: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_any_family_is_served_in_four_bits(tmp_path, kind, family, dtype):
    make_rounded_model(tmp_path, family)
    sequences = Sequences(tmp_path, dtype=dtype, maker=FourBit(kind, GroupsFile(tmp_path)))
    found = [sequences.step(chunks={0: PROMPT[:20]})]
    found += [sequences.step(decodes={0: token}) for token in PROMPT[20:]]

    assert error(torch.cat(found), expected_logits(tmp_path)) < 0.04


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_whose_sizes_make_no_groups_stays_as_it_is(tmp_path, kind):
    model = make_tiny_model(tmp_path, "llama2")  # its inner width is 112
    weights = load_weights(
        tmp_path,
        read_spec(tmp_path),
        torch.device("cpu"),
        torch.float32,
        True,
        maker=FourBit(kind, GroupsFile(tmp_path)),
    )
    x = torch.randn(2, 112)
    expected = x @ model.state_dict()["model.layers.0.mlp.down_proj.weight"].T
    torch.testing.assert_close(weights.layers[0].down(x), expected, atol=1e-5, rtol=1e-4)


def test_more_than_a_few_rows_are_multiplied_by_the_matrix_itself(tmp_path):
    weight = torch.randn(32, 64)
    made = FourBit("weight-only", GroupsFile(tmp_path)).site(Parts(names=["none"], weight=lambda: weight))
    few = FEW_ROWS[torch.float32]
    many = torch.randn(few + 1, 64)

    torch.testing.assert_close(made(many), many @ weight.T)
    assert (made(many[:few]) - many[:few] @ weight.T).abs().max() > 0.01


def test_groups_that_a_file_has_are_taken_as_they_are(tmp_path):
    groups = in_four_bits(torch.randn(32, 64))
    minima = groups.middles - MIDDLE * groups.scales
    save_file({f"w{CODES}": groups.codes, f"w{SCALES}": groups.scales, f"w{MINIMA}": minima}, tmp_path / GROUPS_FILE)
    found = GroupsFile(tmp_path)

    def weight() -> Tensor:
        raise AssertionError("four bits alone need no other")

    x = torch.randn(3, 64)
    made = FourBit("dynamic", found).site(Parts(names=["w"], weight=weight))
    assert error(made(x), x @ groups.weights().T) < 0.02
    assert found.is_there
    assert found.find("another") is None


def test_a_folder_without_the_file_has_no_groups(tmp_path):
    found = GroupsFile(tmp_path)
    assert not found.is_there
    assert found.find("w") is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_has_eight_bits(tmp_path, kind):
    weight, x = torch.randn(64, 96), torch.randn(2, 96)
    made = FourBit(kind, GroupsFile(tmp_path)).head("lm_head.weight", weight)
    upper, lower = in_eight_bits(weight).weights().chunk(2, dim=1)
    assert error(made(x), x @ (upper + lower).T) < 0.01


def test_bytes_are_counted_once(tmp_path):
    make_tiny_model(tmp_path, "llama2", intermediate_size=96, tie_word_embeddings=True)
    spec, cpu = read_spec(tmp_path), torch.device("cpu")
    plain = load_weights(tmp_path, spec, cpu, torch.float32, quiet=True).size_bytes
    files = GroupsFile(tmp_path)
    both = load_weights(tmp_path, spec, cpu, torch.float32, True, maker=FourBit("weight-only", files))
    made = [one for layer in both.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    extra = sum(one._product.size_bytes for one in [*made, both.head])

    assert both.size_bytes == plain + extra


def test_a_rank_s_part_of_a_matrix_in_four_bits_has_the_same_codes(tmp_path):
    groups = in_four_bits(torch.randn(64, 128))
    tensors = {"w.codes": groups.codes, "w.scales": groups.scales.half(), "w.minima": groups.middles.half()}
    tensors |= {"b.codes": torch.randint(-127, 127, (64, 128), dtype=torch.int8), "b.scales": groups.scales.half()}
    save_file(tensors, tmp_path / GROUPS_FILE)
    file = GroupsFile(tmp_path)
    weights = {name: file.find(name).weights() for name in "wb"}

    rows, columns = Cut(0, 16, 48, 64), Cut(1, 32, 96, 128)
    assert torch.equal(file.find("w", rows).weights(), weights["w"][16:48])
    assert torch.equal(file.find("w", columns).weights(), weights["w"][:, 32:96])
    # Eight bits are two matrices of four side by side.
    assert torch.equal(file.find("b", rows).weights(), weights["b"][16:48])
    assert torch.equal(file.find("b", columns).weights(), weights["b"].unflatten(1, (2, -1))[:, :, 32:96].flatten(1))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_products_in_four_bits_add_up(kind, tmp_path):
    groups = in_four_bits(torch.randn(64, 128))
    minima = groups.middles - MIDDLE * groups.scales
    save_file({f"w{CODES}": groups.codes, f"w{SCALES}": groups.scales, f"w{MINIMA}": minima}, tmp_path / GROUPS_FILE)
    four_bit, x = FourBit(kind, GroupsFile(tmp_path)), torch.randn(3, 128)

    def product(first: int, end: int) -> Tensor:
        part = groups.weights()[:, first:end].contiguous()
        made = four_bit.site(Parts(names=["w"], weight=lambda: part, cut_of=lambda _: Cut(1, first, end, 128)))
        return made(x[:, first:end].contiguous())

    assert error(product(0, 64) + product(64, 128), x @ groups.weights().T) < 0.02
