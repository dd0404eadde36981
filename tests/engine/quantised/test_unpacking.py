"""The assembly that unpacks codes gives the numbers that they stand for, by the rules of its instructions."""

from __future__ import annotations

import pytest
import torch

from tests.engine.triton_interpreter import load

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
def test_four_bits(name):
    assembly, minus = getattr(unpacking, f"FOUR_BITS_{name}").value, {"BFLOAT16": "MINUS_128", "FLOAT16": "MINUS_1024"}
    for zero in (0, 7, 8, 16, 127):
        pair = zero * 0x10001 + getattr(unpacking, minus[name]).value
        for word in (0x76543210, 0xFEDCBA98, 0x0F0F0F0F):
            codes = [word >> shift & 15 for shift in (0, 16, 4, 20, 8, 24, 12, 28)]
            assert run(assembly, DTYPES[name], word, pair) == [code - zero for code in codes]


@pytest.mark.parametrize("name", DTYPES)
def test_eight_bits(name):
    assembly = getattr(unpacking, f"EIGHT_BITS_{name}").value
    for first in range(0, 256, 4):
        codes = torch.arange(first, first + 4, dtype=torch.uint8)
        expected = codes.view(torch.float8_e4m3fn).float()[[0, 2, 1, 3]]
        found = torch.tensor(run(assembly, DTYPES[name], int(codes.view(torch.int32))))
        is_number = ~expected.isnan()
        assert torch.equal(found[is_number], expected[is_number])
        assert torch.equal(found[is_number].signbit(), expected[is_number].signbit())
