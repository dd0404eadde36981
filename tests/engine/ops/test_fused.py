"""The fused operations against their reference twins in float32: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rota.engine.kv_cache import CacheShape, KVCache
from rota.engine.layer_cache import EIGHT_BITS, LayerCache, from_eight_bits
from rota.engine.ops.reference import Operations
from rota.engine.quantised.codes import carried
from rota.engine.step.device_step import DeviceStep, int32
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

reference = Operations()
operations = load("rota.engine.ops.fused")
fused = operations.FusedOperations()

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = list(BOUNDS)
EPSILON = 1e-5


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1000])
def test_rms_norm_divides_each_token_by_its_root_mean_square(width, dtype):
    x, weight = random(7, width, dtype=dtype), random(width, dtype=dtype)
    expected = reference.rms_norm(x.float(), weight.float(), EPSILON)
    assert relative_error(fused.rms_norm(x, weight, EPSILON), expected) < BOUNDS[dtype]


def test_rms_norm_reads_rows_that_lie_apart():
    x, weight = random(5, 192)[:, 64:128], random(64)
    assert relative_error(fused.rms_norm(x, weight, EPSILON), reference.rms_norm(x, weight, EPSILON)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum(dtype):
    x, residual, weight = random(7, 576, dtype=dtype), random(7, 576, dtype=dtype), random(576, dtype=dtype)
    expected_norm, expected_total = reference.add_rms_norm(x.float(), residual.float(), weight.float(), EPSILON)
    norm, total = fused.add_rms_norm(x, residual, weight, EPSILON)
    assert relative_error(total, expected_total) < BOUNDS[dtype]
    assert relative_error(norm, expected_norm) < BOUNDS[dtype]


def test_add_rms_norm_leaves_alone_what_lies_between_rows():
    wide, residual, weight = random(7, 640), random(7, 576), random(576)
    beside, x = wide[:, 576:].clone(), wide[:, :576]
    expected_norm, expected_total = reference.add_rms_norm(x, residual, weight, EPSILON)
    norm, total = fused.add_rms_norm(x, residual, weight, EPSILON)
    assert relative_error(total, expected_total) < BOUNDS[torch.float32]
    assert relative_error(norm, expected_norm) < BOUNDS[torch.float32]
    assert torch.equal(wide[:, 576:], beside)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 2500])
def test_silu_multiply_gates_the_second_half_with_the_first(width, dtype):
    gate_up = random(5, 2 * width, dtype=dtype)
    assert relative_error(fused.silu_multiply(gate_up), reference.silu_multiply(gate_up.float())) < BOUNDS[dtype]


SHAPES = [
    # heads, kv_heads, head_dim, block_size, dtype
    (9, 3, 64, 16, torch.float32),
    (32, 8, 128, 16, torch.bfloat16),
    (2, 2, 80, 8, torch.float16),
    (3, 1, 96, 32, torch.bfloat16),
]


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "dtype"), SHAPES)
def test_queries_and_keys_are_rotated_and_the_cache_gets_keys_and_values(
    heads, kv_heads, head_dim, block_size, dtype, with_norms
):
    tokens = 5
    qkv, weights = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype), random(2, head_dim, dtype=dtype)
    rotary = random(50, head_dim)
    slots = torch.randperm(6 * block_size)[:tokens].to(DEVICE)
    step = step_of(positions=torch.tensor([0, 1, 49, 7, 3], device=DEVICE), slots=slots)

    def outcome(ops, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.zeros(2, 6, kv_heads, block_size, head_dim, dtype=dtype, device=DEVICE)
        norms = (weights[0].to(dtype), weights[1].to(dtype), EPSILON) if with_norms else None
        cache = LayerCache(keys=keys, values=values)
        return ops.rotate_and_store(qkv.to(dtype), rotary, step, cache, norms), keys, values

    query, keys, values = outcome(fused, dtype)
    expected_query, expected_keys, expected_values = outcome(reference, torch.float32)

    assert relative_error(query, expected_query) < BOUNDS[dtype]
    assert relative_error(keys, expected_keys) < BOUNDS[dtype]
    assert torch.equal(values.float(), expected_values)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "dtype"), SHAPES)
def test_a_cache_in_eight_bits_gets_codes_and_scales_as_the_reference_gives_them(
    heads, kv_heads, head_dim, block_size, dtype, with_norms
):
    qkv, weights = random(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype), random(2, head_dim, dtype=dtype)
    qkv[0, -head_dim:], qkv[1, -head_dim:], qkv[2] = 0.0, 1e-6, qkv[2] * 100.0
    rotary, slots = random(50, head_dim), torch.randperm(6 * block_size)[:5].to(DEVICE)
    step = step_of(positions=torch.tensor([0, 1, 49, 7, 3], device=DEVICE), slots=slots)
    norms = (*weights, EPSILON) if with_norms else None
    found, expected = (in_eight_bits_of(6, kv_heads, block_size, head_dim) for _ in range(2))

    query = fused.rotate_and_store(qkv, rotary, step, found, norms)
    expected_query = reference.rotate_and_store(qkv, rotary, step, expected, norms)

    assert relative_error(query, expected_query.float()) < BOUNDS[dtype]
    torch.testing.assert_close(found.scales[..., 1], expected.scales[..., 1])
    assert (found.scales[..., 1] == 1.0).sum() == 1  # of zeros
    torch.testing.assert_close(found.scales[..., 0], expected.scales[..., 0], rtol=2e-2, atol=0.0)
    # A number that the two round to different codes is one step apart, and few are. Keys are normed and rotated before,
    # and in bfloat16 a twentieth of them come to another code: the root of that share, times a step of a tenth.
    steps = codes_apart(found.values, expected.values)
    assert steps.max() <= 1
    assert steps.float().mean() < 0.01
    keys = [from_eight_bits(cache.keys, cache.scales[..., 0], torch.float32) for cache in (found, expected)]
    assert relative_error(*keys) < 0.03


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_is_stored_as_not_a_number_and_only_that_one(bad):
    """Attention then gives NaN, its own logits are NaN, and its request ends with an error: never with wrong tokens."""
    qkv = random(2, 5 * 64)  # three query heads, a key and a value
    qkv[0, 3 * 64 + 7], qkv[1, -1] = bad, bad  # in the first token's key and the second one's value
    cache, at = in_eight_bits_of(1, 1, 8, 64), torch.tensor([0, 1], device=DEVICE)
    fused.rotate_and_store(qkv, random(9, 64), step_of(at, at), cache, None)
    assert cache.scales[0, 0, :2].isnan().tolist() == [[True, False], [False, True]]


def in_eight_bits_of(blocks: int, kv_heads: int, block_size: int, head_dim: int) -> LayerCache:
    shape = CacheShape(layers=1, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=EIGHT_BITS)
    return KVCache(blocks - 1, shape, torch.device(DEVICE)).layers[0]


def codes_apart(found: Tensor, expected: Tensor) -> Tensor:
    """How many steps of the eight-bit numbers lie between: their bits count like signed numbers."""
    bits = torch.stack((found, expected)).view(torch.uint8).int()
    ordered = torch.where(bits < 128, bits, 128 - bits)
    return (ordered[0] - ordered[1]).abs()


def step_of(positions: Tensor, slots: Tensor) -> DeviceStep:
    nobody = int32([], DEVICE)
    return DeviceStep(positions, positions, slots, nobody, nobody, nobody)


# Operations that round what they write: the rows of their twins, and the codes that the product would have made.

rounding = operations.FusedOperations(rounds=True)
scaled_product = load("rota.engine.quantised.scaled_product")
ROWS = 18


def random_halves(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE, torch.bfloat16)


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)
    mine, theirs = carried(found), scaled_product.round_rows(expected)
    assert mine is not None
    assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    torch.testing.assert_close(mine.scales, theirs.scales, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_norm_rounds_the_rows_that_it_writes():
    x, weight = random_halves(ROWS, 80), random_halves(80)
    assert_rounded(rounding.rms_norm(x, weight, EPSILON), fused.rms_norm(x, weight, EPSILON))


def test_so_does_a_norm_that_adds_to_rows_which_lie_apart():
    x, residual, weight = random_halves(ROWS, 96)[:, :64], random_halves(ROWS, 64), random_halves(64)
    x[1, 3] = torch.inf  # its scale is not a number, and no other row's
    expected, expected_total = fused.add_rms_norm(x, residual.clone(), weight, EPSILON)
    found, total = rounding.add_rms_norm(x, residual, weight, EPSILON)
    assert torch.equal(total, expected_total)
    is_finite = torch.arange(ROWS, device=DEVICE) != 1
    assert torch.equal(found[is_finite], expected[is_finite])
    rounded, theirs = carried(found), scaled_product.round_rows(expected)
    assert rounded is not None
    assert rounded.scales.isfinite().tolist() == is_finite.tolist()
    assert torch.equal(rounded.codes[is_finite].view(torch.uint8), theirs.codes[is_finite].view(torch.uint8))


def test_so_does_silu():
    gate_up = random_halves(ROWS, 2 * 112)
    assert_rounded(rounding.silu_multiply(gate_up), fused.silu_multiply(gate_up))


def test_rows_of_broken_words_carry_nothing():
    x, weight = random_halves(ROWS, 72), random_halves(72)
    found = rounding.rms_norm(x, weight, EPSILON)
    assert carried(found) is None
    assert torch.equal(found, fused.rms_norm(x, weight, EPSILON))


def test_a_tensor_made_from_rows_does_not_carry_their_codes():
    rows = rounding.rms_norm(random_halves(ROWS, 64), random_halves(64), EPSILON)
    assert carried(rows) is not None
    assert carried(rows[1:]) is None
    assert carried(rows * 2) is None


def test_a_product_takes_the_codes_that_its_rows_carry(monkeypatch):
    given = []
    monkeypatch.setattr(scaled_product.ScaledProduct, "multiply", lambda _, rounded, *__: given.append(rounded))
    product = object.__new__(scaled_product.ScaledProduct)
    rows = rounding.rms_norm(random_halves(ROWS, 64), random_halves(64), EPSILON)
    product(rows, None)
    product(rows.clone(), None)
    assert given[0] is carried(rows)
    assert torch.equal(given[1].codes.view(torch.uint8), given[0].codes.view(torch.uint8))
