# SPDX-License-Identifier: Apache-2.0
"""Scalar math of the language: the torch meaning of each function, and its name in generated C++.

Results are within a few units in the last place of the operand type. Low-precision operands are computed in float32 and
rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_tile.intrinsics.base import Intrinsic, Rule, declare, floating, predicate, same
from torch_tile.ir import dtype as dt


def _torch(name: str) -> Callable[..., Any]:
    """Return the meaning of an intrinsic as torch's function of the same name."""

    def evaluate(*args: Any) -> Any:
        import torch

        return getattr(torch, name)(*args)

    return evaluate


def _float_from_bits(bits: Any, mask: Any, flip: Any) -> Any:
    """Reinterpret masked and flipped bits as a float32."""
    import torch

    return ((bits & mask) ^ flip).to(torch.int32).view(torch.float32)


def _nibble(word: Any, byte: Any, upper: Any) -> Any:
    """Return a 4-bit field of a word as a float32."""
    return (word >> (8 * byte + 4 * upper) & 15).float()


def _nibble_in_place(word: Any, place: Any, half: Any) -> Any:
    """Return the float32 of a float16 whose bits are a 4-bit field of a word, at bit 0 or 4."""
    return (word >> (16 * half + 4 * place) & 15).float() * (2.0**-24 * (1 + 15 * (place % 2)))


def _float8_of_code(x: Any) -> Any:
    """Return the float8_e4m3fn whose code is `x * 2 ** 24`."""
    import torch

    code = torch.nan_to_num(x.half().clamp_min(0.0), 0.0).view(torch.int16).to(torch.uint8) & 127
    found: Any = code.view(torch.float8_e4m3fn).float()
    return torch.where(torch.isnan(x), x, found)


def _positive_half(x: Any) -> Any:
    """Return `x` rounded to float16, and 0 for what is below 0."""
    return x.half().clamp_min(0.0).float()


def _table_nibble(word: Any, byte: Any, upper: Any, *values: Any) -> Any:
    """Look up the value of a 4-bit field of a word in a table."""
    import torch

    code, found = word >> (8 * byte + 4 * upper) & 15, values[0]
    for number, bits in enumerate(values):
        found = torch.where(code == number, bits, found)
    return found.to(torch.int32).view(torch.float32)


def _table_place(word: Any, byte: Any, lane: Any, part: Any) -> Any:
    """Return where a table of pairs holds the entry of a byte of a word. The table has a copy for each lane."""
    return (word >> 8 * byte & 255) * 64 + 2 * lane + part


def _unary(name: str, torch_name: str | None = None, rule: Rule = floating, cpu: str | None = None) -> None:
    """Declare an intrinsic of one operand."""
    _declare(name, 1, rule, _torch(torch_name or name), cpu)


def _declare(
    name: str, arity: int, rule: Rule, evaluate: Callable[..., Any], cpu: str | None = None, header: str = "cuda_math.h"
) -> None:
    """Declare a math intrinsic. A file of csrc/, `header`, has its CUDA function."""
    declare(Intrinsic(name, arity, rule, cpu or name, evaluate, cuda=name, header=header))


_FLOATING = """
    exp exp2 log log2 log10 log1p expm1 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
    erf erfc sigmoid sqrt rsqrt floor ceil trunc
"""
for _name in _FLOATING.split():
    _unary(_name)
_unary("quick_sigmoid", "sigmoid", cpu="sigmoid")  # on GPUs cheaper, and less exact where it is close to 0
_unary("quick_erf", "erf", cpu="erf")  # on GPUs cheaper, and within 3e-7, not 2 ulp
_unary("quick_tanh", "tanh", cpu="tanh")  # on GPUs cheaper, and within 5e-7, not 3 ulp
_unary("round", "round")  # halves go to the even neighbour, as torch.round and rintf do
_unary("abs", "abs", rule=same)
_unary("isnan", rule=predicate)
_unary("isinf", rule=predicate)
_unary("isfinite", rule=predicate)
# NaN if either operand is NaN, as IEEE 754-2019 has it; the operators min and max give their second operand.
_declare("maximum", 2, same, _torch("maximum"))
_declare("minimum", 2, same, _torch("minimum"))
# A number if either operand is one, as C's fmax has it.
_declare("fmax", 2, same, _torch("fmax"))
_declare("fmin", 2, same, _torch("fmin"))
_declare("pow", 2, floating, _torch("pow"))
_declare("atan2", 2, floating, _torch("atan2"))
_declare("fmod", 2, floating, _torch("fmod"))
_declare("copysign", 2, floating, _torch("copysign"))
_declare("hypot", 2, floating, _torch("hypot"))
# The float32 whose bits are `(bits & mask) ^ flip`: one instruction puts a small integer into a mantissa.
_declare("float_from_bits", 3, lambda args: (dt.int32, dt.float32), _float_from_bits, header="cuda_types.h")
# The bits of a value in another type of its width, the call's own. `ir/bits.py` makes such calls. Their results depend
# on more than operands, so both interpreters have a function for them.
declare(
    Intrinsic(
        "reinterpret", 1, lambda args: (args[0].dtype, args[0].dtype), "reinterpret",
        cuda="reinterpret", header="cuda_types.h",
    )
)  # fmt: skip
# The 4 bits of byte number `byte` of an int32 as an unsigned number. `upper` 1 takes the byte's upper bits.
_declare("nibble", 3, lambda args: (dt.int32, dt.float32), _nibble, header="fields.h")
# A float16, as float32. Its lower byte has field `place` of an int32's half as it lies there, and no other bit is set.
# That is the field times 2^-24, or 2^-20 if `place` is odd. Tensor cores multiply such numbers exactly.
_declare("nibble_in_place", 3, lambda args: (dt.int32, dt.float32), _nibble_in_place, header="fields.h")
# A number rounded to float16, as float32. It is 0 for x below 0, and NaN for NaN.
_declare("positive_half", 1, lambda args: (dt.float32, dt.float32), _positive_half, header="cuda_types.h")
# The float8_e4m3fn whose code is x * 2^24, rounded to an integer, as float32. It is 0 for x below 0, and NaN for NaN.
# x is at most 126 * 2^-24. float16 counts from 0 on in steps of 2^-24, so `positive_half` makes codes.
_declare("float8_of_code", 1, lambda args: (dt.float32, dt.float32), _float8_of_code, header="cuda_types.h")
# The float32 with that index among 16, which follow by their bits.
_declare("table_nibble", 19, lambda args: (dt.int32, dt.float32), _table_nibble, header="fields.h")
# The index of number `part` of the pair that a byte of an int32 selects. The table is `[256, 32, 2]` of 16-bit numbers.
# Each lane of a warp has a copy of the table, in a bank of shared memory of its own.
_declare("table_place", 4, lambda args: (dt.int32, dt.int32), _table_place, header="fields.h")
_declare("fma", 3, floating, lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype))
