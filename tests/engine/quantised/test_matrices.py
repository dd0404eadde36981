"""A model in four bits answers like the model of its rounded weights, whichever product computes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rota.engine.families.table import read_spec
from rota.engine.parallel.shard import Cut
from rota.engine.quantised.groups import (
    GROUP,
    MIDDLE,
    Groups,
    in_eight_bits,
    in_four_bits,
    packed,
    side_by_side,
    stacked,
)
from rota.engine.quantised.maker import Parts
from rota.engine.quantised.matrices import (
    FEW_ROWS,
    DynamicProduct,
    FourBit,
    GroupsFile,
    Kind,
    WeightOnlyProduct,
)
from rota.engine.quantised.names import CODES, GROUPS_FILE, MINIMA, SCALES
from rota.engine.weights.load import load_weights
from tests.engine.model.sequence import Sequences
from tests.engine.model_factory import make_tiny_model
from tests.engine.nearness import relative_error

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_any_family_is_served_in_four_bits(tmp_path, kind, family, dtype):
    make_rounded_model(tmp_path, family)
    sequences = Sequences(tmp_path, dtype=dtype, maker=FourBit(kind, GroupsFile(tmp_path)))
    found = [sequences.step(chunks={0: PROMPT[:20]})]
    found += [sequences.step(decodes={0: token}) for token in PROMPT[20:]]

    assert relative_error(torch.cat(found), expected_logits(tmp_path)) < 0.04


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
    assert relative_error(made(x), x @ groups.weights().T) < 0.02
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
    assert relative_error(made(x), x @ (upper + lower).T) < 0.01


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

    assert relative_error(product(0, 64) + product(64, 128), x @ groups.weights().T) < 0.02


# A matrix in groups is the matrix, but for what rounding takes.


def random_matrix(outputs: int = 24, inputs: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def halves(groups: Groups) -> torch.Tensor:
    """The matrix that two side by side stand for."""
    upper, lower = groups.weights().chunk(2, dim=1)
    return upper + lower


def test_codes_lie_two_to_a_byte_and_come_back():
    codes = torch.arange(16).repeat(2, 4)
    groups = Groups(packed(codes), torch.ones(2, 2), torch.zeros(2, 2))
    assert groups.codes.shape == (2, 32)
    assert groups.codes[0, 0] == 0 + 16 * 1
    assert torch.equal(groups.unpacked(), codes.to(torch.uint8))
    assert (groups.outputs, groups.inputs) == (2, 64)


@given(seed=st.integers(0, 1000), spread=st.floats(1e-6, 1e4))
def test_a_weight_in_four_bits_is_off_by_half_a_step_at_most(seed, spread):
    weight = spread * random_matrix(seed=seed)
    groups = in_four_bits(weight)
    steps = groups.scales.repeat_interleave(GROUP, dim=1)
    # Scales lie in bfloat16: the last code of a group may fall short of its largest weight by a sixteenth of a step.
    assert ((groups.weights() - weight).abs() <= 0.57 * steps + 1e-6 * spread).all()


@given(seed=st.integers(0, 1000))
def test_a_weight_in_eight_bits_is_off_by_half_a_step_at_most(seed):
    weight = random_matrix(seed=seed)
    groups = in_eight_bits(weight)
    steps = groups.scales[:, 3:].repeat_interleave(GROUP, dim=1)
    assert ((halves(groups) - weight).abs() <= steps).all()
    assert float(((halves(groups) - weight) / weight.std()).abs().mean()) < 0.01


def test_eight_bits_are_two_matrices_of_four_side_by_side():
    codes = torch.arange(-128, 128).to(torch.int8).view(4, 64)
    scales = torch.rand(4, 2)
    groups = side_by_side(codes, scales)
    assert torch.allclose(halves(groups), codes.float() * scales.repeat_interleave(GROUP, dim=1))


def test_a_group_of_equal_weights_is_exact():
    weight = torch.full((1, GROUP), -0.75)
    assert torch.equal(in_four_bits(weight).weights(), weight)
    assert torch.equal(in_four_bits(torch.zeros(1, GROUP)).weights(), torch.zeros(1, GROUP))
    assert torch.equal(halves(in_eight_bits(torch.zeros(1, GROUP))), torch.zeros(1, GROUP))


def test_matrices_of_the_same_inputs_lie_one_below_the_other():
    first, second = in_four_bits(random_matrix(8)), in_four_bits(random_matrix(16))
    both = stacked([first, second])
    assert torch.equal(both.weights(), torch.cat((first.weights(), second.weights())))
    assert stacked([first]) is first


# Products in four bits give what they say they give: torch's own beside plain torch.


def dynamic_reference(x: Tensor, groups: Groups) -> Tensor:
    """What `DynamicProduct` computes, in plain torch."""
    exact = x.float()
    lowest, highest = exact.amin(1, keepdim=True).clamp(max=0.0), exact.amax(1, keepdim=True).clamp(min=0.0)
    step = (highest - lowest) / 255
    step = step.where(step > 0, 1.0)
    # The code of zero, by the more exact of two formulas.
    from_below, from_above = -128 - lowest / step, 127 - highest / step
    is_nearer_below = (-128 + lowest / step) + (127 + highest / step) > 0
    zero_code = from_below.where(is_nearer_below, from_above).clamp(-128, 127).round()
    rounded = ((exact / step).round() + zero_code).clamp(-128, 127)
    scaled = Groups(groups.codes, groups.scales.bfloat16().float(), torch.zeros_like(groups.middles))
    sums = exact.unflatten(1, (-1, GROUP)).sum(2)
    return ((rounded - zero_code) * step @ scaled.weights().T + sums @ groups.middles.T).to(x.dtype)


def weight_only_reference(x: Tensor, groups: Groups) -> Tensor:
    """What `WeightOnlyProduct` computes, in plain torch."""
    rounded = Groups(groups.codes, groups.scales.bfloat16().float(), groups.middles.bfloat16().float())
    return (x.bfloat16().float() @ rounded.weights().T).bfloat16().to(x.dtype)


PRODUCTS = {
    "dynamic": (DynamicProduct, dynamic_reference),
    "weight-only": (WeightOnlyProduct, weight_only_reference),
}
# A product may sum in another order than the reference; one in bfloat16 then rounds to a neighbour now and then.
TOLERANCE = {"dynamic": 1e-5, "weight-only": 8e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize("make", [in_four_bits, in_eight_bits])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_is_its_reference(kind, make, rows, dtype):
    torch.manual_seed(rows)
    groups: Groups = make(torch.randn(48, 64))
    x = 3 * torch.randn(rows, groups.inputs, dtype=dtype)
    product, reference = PRODUCTS[kind]
    found = product(groups)(x)

    assert found.dtype is dtype
    assert found.shape == (rows, 48)
    assert relative_error(found, reference(x, groups)) < (TOLERANCE[kind] if dtype is torch.float32 else 8e-3)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_is_near_the_exact_one(kind):
    torch.manual_seed(0)
    groups = in_four_bits(torch.randn(64, 256))
    x = torch.randn(5, 256)
    assert relative_error(PRODUCTS[kind][0](groups)(x), x @ groups.weights().T) < 0.02


def test_a_dynamic_product_takes_any_number_of_outputs():
    groups = in_four_bits(torch.randn(33, 64))
    x = torch.randn(2, 64)
    assert relative_error(DynamicProduct(groups)(x), dynamic_reference(x, groups)) < 1e-5


def test_four_bits_take_less_than_a_third_of_what_bfloat16_takes():
    groups = in_four_bits(torch.randn(512, 1024))
    assert WeightOnlyProduct(groups).size_bytes < 0.32 * 2 * 512 * 1024
