"""Codes are unpacked two at a time, by the bits of the numbers: converting each integer takes more instructions.

    four bits    0x4300 | code  is  128 + code  in bfloat16 (0x6400: 1024 + code in float16), and a subtraction is exact
    eight bits   s eeee mmm, moved to where 16 bits have sign, exponent and mantissa, is the number times 2**-120
                 (2**-8 in float16), and a product is exact

A word of 32 bits holds pairs of codes, one code in each half (`packing.py`). What assembly makes of a pair is one
register of two numbers, as tensor cores take them. The interpreter has no assembly, nor 16-bit floats that it can
multiply: there the same codes become float32.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# Registers of 16 bits for the numbers, then the word; with four bits also a pair of zeros.
EIGHT_NUMBERS = tl.constexpr(",".join(["=h"] * 8 + ["r", "r"]))
FOUR_NUMBERS = tl.constexpr(",".join(["=h"] * 4 + ["r"]))
# lop3's table of (a & b) | c.
AND_OR = "0xea"


def _four_bits(kind: str, magic: str, one: str) -> str:
    """$0 … $7: numbers; $8: the word; $9: what is added to a pair, minus the magic number and the zero."""
    lines = [".reg .b32 moved, pair, one;", f"mov.b32 one, {one};"]
    for nth in range(4):
        lines += [
            f"shr.u32 moved, $8, {4 * nth};",
            f"lop3.b32 pair, moved, 0x000f000f, {magic}, {AND_OR};",
            f"fma.rn.{kind}x2 pair, pair, one, $9;",
            f"mov.b32 {{${2 * nth}, ${2 * nth + 1}}}, pair;",
        ]
    return "{" + " ".join(lines) + "}"


def _eight_bits(kind: str, right: int, magnitude: str, factor: str) -> str:
    """$0 … $3: numbers; $4: the word, whose codes move `right` from the upper byte of a half."""
    places = (f"shl.b32 sign, $4, 8; shl.b32 moved, $4, {8 - right};", f"mov.b32 sign, $4; shr.u32 moved, $4, {right};")
    # A product is an addition too, of -0: then a zero keeps its sign.
    lines = [".reg .b32 sign, moved, pair, factor, none;", f"mov.b32 factor, {factor}; mov.b32 none, 0x80008000;"]
    for nth, place in enumerate(places):
        lines += [
            place,
            f"and.b32 moved, moved, {magnitude};",
            f"lop3.b32 pair, sign, 0x80008000, moved, {AND_OR};",
            f"fma.rn.{kind}x2 pair, pair, factor, none;",
            f"mov.b32 {{${2 * nth}, ${2 * nth + 1}}}, pair;",
        ]
    return "{" + " ".join(lines) + "}"


FOUR_BITS_BFLOAT16 = tl.constexpr(_four_bits("bf16", "0x43004300", "0x3f803f80"))
FOUR_BITS_FLOAT16 = tl.constexpr(_four_bits("f16", "0x64006400", "0x3c003c00"))
EIGHT_BITS_BFLOAT16 = tl.constexpr(_eight_bits("bf16", 4, "0x07f007f0", "0x7b807b80"))
EIGHT_BITS_FLOAT16 = tl.constexpr(_eight_bits("f16", 1, "0x3f803f80", "0x5c005c00"))
# -128 and -1024, twice, as one integer; what is added to their bits is added to the numbers.
MINUS_128 = tl.constexpr(0xC300C300 - 2**32)
MINUS_1024 = tl.constexpr(0xE400E400 - 2**32)
# From the exponents of eight bits to those of 32.
LARGER_EXPONENT = tl.constexpr(2.0**120)


@triton.jit
def unpack_four(words, zeros, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operand: tl.constexpr):
    """words [OUTPUTS, INPUTS / 8] and zeros [OUTPUTS, 1], int32 -> code - zero, [OUTPUTS, INPUTS]."""
    zeros = tl.broadcast_to(zeros, words.shape)
    if operand == tl.bfloat16:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            FOUR_BITS_BFLOAT16, EIGHT_NUMBERS, [words, zeros * 0x10001 + MINUS_128], (tl.bfloat16,) * 8, True, 1
        )
    elif operand == tl.float16:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            FOUR_BITS_FLOAT16, EIGHT_NUMBERS, [words, zeros * 0x10001 + MINUS_1024], (tl.float16,) * 8, True, 1
        )
    else:
        n0, n1, n2, n3 = _four_codes(words, 0)
        n4, n5, n6, n7 = _four_codes(words, 8)
        zeros = zeros.to(tl.float32)
        n0, n1, n2, n3 = n0 - zeros, n1 - zeros, n2 - zeros, n3 - zeros
        n4, n5, n6, n7 = n4 - zeros, n5 - zeros, n6 - zeros, n7 - zeros
    low, high = tl.join(tl.join(n0, n1), tl.join(n2, n3)), tl.join(tl.join(n4, n5), tl.join(n6, n7))
    numbers = tl.reshape(tl.join(low, high), [OUTPUTS, INPUTS // 32, 4, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 1, 5, 4, 2, 3]), [OUTPUTS, INPUTS])


@triton.jit
def unpack_eight(words, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operand: tl.constexpr):
    """words [OUTPUTS, INPUTS / 4] int32 -> numbers, [OUTPUTS, INPUTS]."""
    if operand == tl.bfloat16:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            EIGHT_BITS_BFLOAT16, FOUR_NUMBERS, [words], (tl.bfloat16,) * 4, True, 1
        )
    elif operand == tl.float16:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            EIGHT_BITS_FLOAT16, FOUR_NUMBERS, [words], (tl.float16,) * 4, True, 1
        )
    else:
        n0, n1, n2, n3 = _number(words), _number(words >> 16), _number(words >> 8), _number(words >> 24)
    numbers = tl.reshape(tl.join(tl.join(n0, n1), tl.join(n2, n3)), [OUTPUTS, INPUTS // 16, 4, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 1, 4, 2, 3]), [OUTPUTS, INPUTS])


@triton.jit
def _four_codes(words, first: tl.constexpr):
    """Two pairs of a word, as float32."""
    low, high = words >> first, words >> (first + 16)
    n0, n1, n2, n3 = low & 15, high & 15, (low >> 4) & 15, (high >> 4) & 15
    return n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)


@triton.jit
def _number(code):
    """The lowest eight bits as float32."""
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * LARGER_EXPONENT
