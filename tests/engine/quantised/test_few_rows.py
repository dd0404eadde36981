"""The kernels for a packed matrix against float32, and the assembly that unpacks its codes by its own rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.engine.quantised.codes import Scaled
from rota.engine.quantised.packing import Packed, pack_eight_bits, pack_four_bits, step_of
from rota.engine.quantised.products import in_eight_bit_floats
from tests.engine.nearness import relative_error
from tests.engine.quantised.few_bits import on_device, random_codes
from tests.engine.triton_interpreter import DEVICE, load

few_rows = load("rota.engine.quantised.few_rows")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def product(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None, **tuning: int) -> torch.Tensor:
    """Twice, because what a product leaves behind must not reach the next."""
    ended = few_rows.ended_for(packed)
    chosen = few_rows.ProductTuning(**{"columns": 64, "shares": 2, **tuning})
    first, second = (few_rows.multiply(x, packed, bias, ended, chosen) for _ in range(2))
    assert torch.equal(first, second)
    assert not ended.any()
    return first


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "rows", "dtype", "columns", "shares"),
    [
        (64, 256, 128, 1, torch.bfloat16, 64, 1),
        (130, 256, 64, 3, torch.float16, 128, 2),
        (33, 192, 32, 16, torch.bfloat16, 64, 4),
        (100, 320, None, 17, torch.bfloat16, 64, 2),
        (65, 512, 256, 64, torch.float16, 128, 1),
        (64, 96, None, 2, torch.bfloat16, 64, 8),
        (130, 128, 64, 150, torch.bfloat16, 128, 2),
    ],
)
def test_four_bits(outputs, inputs, group, rows, dtype, columns, shares):
    codes = on_device(random_codes(outputs, inputs, group), DEVICE)
    x, bias = (torch.randn(*shape).to(DEVICE, dtype) for shape in ((rows, inputs), (outputs,)))
    packed = pack_four_bits(codes, step_of(codes))
    found = product(x, packed, bias, columns=columns, shares=shares)
    assert found.dtype is dtype
    assert relative_error(found, x.float() @ codes.weights().T + bias.float()) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "dtype", "columns", "shares"),
    [
        (64, 256, 1, torch.bfloat16, 64, 1),
        (144, 272, 3, torch.float16, 128, 2),
        (48, 80, 17, torch.bfloat16, 64, 2),
        (16, 512, 64, torch.bfloat16, 64, 4),
    ],
)
def test_eight_bits(outputs, inputs, rows, dtype, columns, shares):
    matrix = in_eight_bit_floats(torch.randn(outputs, inputs).to(DEVICE))
    x = torch.randn(rows, inputs).to(DEVICE, dtype)
    found = product(x, pack_eight_bits(matrix), columns=columns, shares=shares)
    assert relative_error(found, x.float() @ matrix.weights().T) < BOUNDS[dtype]


def test_every_number_of_eight_bits_is_exact():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[every.float().isfinite()]
    codes = torch.cat((every, every[:2])).view(16, 16).to(DEVICE)
    packed = pack_eight_bits(Scaled(codes, torch.ones(16, device=DEVICE)))
    for dtype in BOUNDS:
        assert torch.equal(product(torch.eye(16).to(DEVICE, dtype), packed).float().T, codes.float())


@settings(deadline=None, max_examples=5)
@given(
    outputs=st.integers(1, 140), groups=st.integers(1, 4), width=st.sampled_from([32, 64, 96]), rows=st.integers(1, 40)
)
def test_sizes_of_any_kind(outputs, groups, width, rows):
    codes = on_device(random_codes(outputs, groups * width, width), DEVICE)
    x = torch.randn(rows, groups * width).to(DEVICE, torch.bfloat16)
    packed = pack_four_bits(codes, step_of(codes))
    assert relative_error(product(x, packed), x.float() @ codes.weights().T) < BOUNDS[torch.bfloat16]


def test_rows_may_lie_apart():
    codes = on_device(random_codes(64, 128, 64), DEVICE)
    x = torch.randn(5, 300).to(DEVICE, torch.bfloat16)[:, 100:228]
    packed = pack_four_bits(codes, step_of(codes))
    assert torch.equal(product(x, packed), product(x.contiguous(), packed))


def test_a_row_that_is_not_finite_leaves_its_neighbours():
    codes = on_device(random_codes(64, 128, 64), DEVICE)
    packed, x = pack_four_bits(codes, step_of(codes)), torch.randn(3, 128).to(DEVICE, torch.bfloat16)
    expected = product(x, packed)
    x[1, 5] = torch.nan
    found = few_rows.multiply(
        x, packed, None, torch.zeros(1, dtype=torch.int32, device=DEVICE), few_rows.ProductTuning(columns=64, shares=2)
    )
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(130, 256, 128), (70, 200, None), (64, 96, 32)])
def test_a_matrix_is_written_out(dtype, outputs, inputs, group):
    codes = on_device(random_codes(outputs, inputs, group), DEVICE)
    packed = pack_four_bits(codes, step_of(codes))
    first = 64 if outputs > 64 else 0
    found = few_rows.written_out(packed, dtype, first, outputs)
    # A scale keeps 15 bits of its mantissa, which may round a weight to its other neighbour.
    bound = max(2.0**-16, torch.finfo(dtype).eps)
    torch.testing.assert_close(found, codes.weights()[first:].to(dtype), rtol=bound, atol=0.0)


# The assembly that unpacks codes gives the numbers that they stand for, by the rules of its instructions.

unpacking = load("rota.engine.quantised.few_rows")
DTYPES = {"BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16}


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers of a register, the lower half first."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def register(numbers: torch.Tensor) -> int:
    low, high = (int(one) & 0xFFFF for one in numbers.view(torch.int16))
    return low | high << 16


def run(assembly: str, dtype: torch.dtype, *inputs: int) -> list[float]:
    """The outputs $0, $1, … of assembly whose inputs come behind them."""
    outputs: dict[str, float] = {}
    count = sum(line.count("$") for line in assembly.split(";") if "{$" in line)
    registers = {f"${count + nth}": value & 0xFFFFFFFF for nth, value in enumerate(inputs)}

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for line in assembly.strip("{} ").replace("{$", "$").split(";"):
        operation, *operands = line.replace(",", " ").replace("}", "").split() or [".reg"]
        if operation == ".reg":
            continue
        target, *sources = operands
        if operation == "mov.b32" and len(sources) == 2:
            outputs |= dict(zip(operands[:2], halves(value(sources[1]), dtype).tolist(), strict=True))
            continue
        found = [value(one) for one in sources]
        if operation.startswith("fma.rn"):
            a, b, c = (halves(one, dtype).double() for one in found)
            registers[target] = register((a * b + c).to(dtype))
        elif operation == "lop3.b32":
            assert found[3] == 0xEA
            registers[target] = found[0] & found[1] | found[2]
        else:
            registers[target] = {
                "mov.b32": lambda a: a,
                "and.b32": lambda a, b: a & b,
                "shr.u32": lambda a, b: a >> b,
                "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
            }[operation](*found)
    return [outputs[f"${nth}"] for nth in range(count)]


@pytest.mark.parametrize("name", DTYPES)
def test_four_bits_are_unpacked(name):
    assembly, minus = getattr(unpacking, f"FOUR_BITS_{name}").value, {"BFLOAT16": "MINUS_128", "FLOAT16": "MINUS_1024"}
    for zero in (0, 7, 8, 16, 127):
        pair = zero * 0x10001 + getattr(unpacking, minus[name]).value
        for word in (0x76543210, 0xFEDCBA98, 0x0F0F0F0F):
            codes = [word >> shift & 15 for shift in (0, 16, 4, 20, 8, 24, 12, 28)]
            assert run(assembly, DTYPES[name], word, pair) == [code - zero for code in codes]


@pytest.mark.parametrize("name", DTYPES)
def test_eight_bits_are_unpacked(name):
    assembly = getattr(unpacking, f"EIGHT_BITS_{name}").value
    for first in range(0, 256, 4):
        codes = torch.arange(first, first + 4, dtype=torch.uint8)
        expected = codes.view(torch.float8_e4m3fn).float()[[0, 2, 1, 3]]
        found = torch.tensor(run(assembly, DTYPES[name], int(codes.view(torch.int32))))
        is_number = ~expected.isnan()
        assert torch.equal(found[is_number], expected[is_number])
        assert torch.equal(found[is_number].signbit(), expected[is_number].signbit())
