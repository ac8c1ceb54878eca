# SPDX-License-Identifier: Apache-2.0
"""Small matrices of one warp: mma.sync, ldmatrix, stmatrix, and the layout of each operand.

`FRAGMENTS` states each operand of each shape once, as digits of lane and register. Layouts, index arithmetic and the
meaning of `mma` are derived from it. The C++ is in csrc/mma.h and csrc/memory.h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch_tile.hardware import AMPERE, HOPPER, Target
from torch_tile.intrinsics.base import Access, Intrinsic, declare, same
from torch_tile.intrinsics.memory import elements, option
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Address, Call, Expr
from torch_tile.ir.layout import Digit
from torch_tile.ir.stmt import Do

Digits = tuple[Digit, ...]


@dataclass(frozen=True)
class Shape:
    """One mma instruction: `d[m, n] += a[m, k] * b[k, n]`, each operand's two dimensions as digits, major to minor."""

    m: int
    n: int
    k: int
    a: tuple[Digits, Digits]
    b: tuple[Digits, Digits]
    d: tuple[Digits, Digits]

    def registers(self, operand: str) -> int:
        """Return the elements of operand "a", "b" or "d" that one lane holds."""
        size = {"a": self.m * self.k, "b": self.k * self.n, "d": self.m * self.n}[operand]
        return size // 32

    def in_byte_order(self) -> Shape:
        """Return the instruction with k counted so that a lane's elements of b are neighbours along k, as a's."""
        return replace(self, a=(self.a[0], digits_of("4:1t 2:4r 2:1r")), b=(digits_of("4:1t 2:2r 2:1r"), self.b[1]))


def digits_of(text: str) -> Digits:
    """Parse digits such as "2:2r 8:4t", with size, stride and axis."""
    found = []
    for item in text.split():
        size, rest = item.split(":")
        found.append(Digit(int(size), int(rest[:-1]), rest[-1]))
    return tuple(found)


def _shape(m: int, n: int, k: int, a: tuple[str, str], b: tuple[str, str], d: tuple[str, str]) -> Shape:
    """Describe an MMA shape by the thread and register digits of its fragments."""
    operands = ((digits_of(rows), digits_of(columns)) for rows, columns in (a, b, d))
    return Shape(m, n, k, *operands)


_D = ("2:2r 8:4t", "4:1t 2:1r")
FRAGMENTS = {
    "m16n8k16": _shape(16, 8, 16, ("2:2r 8:4t", "2:4r 4:1t 2:1r"), ("2:2r 4:1t 2:1r", "8:4t"), _D),  # 16 bits
    "m16n8k32": _shape(16, 8, 32, ("2:4r 8:4t", "2:8r 4:1t 4:1r"), ("2:4r 4:1t 4:1r", "8:4t"), _D),  # 8 bits
    "m16n8k8": _shape(16, 8, 8, ("2:1r 8:4t", "2:2r 4:1t"), ("2:1r 4:1t", "8:4t"), _D),  # tf32
    "m8n8k4": _shape(8, 8, 4, ("8:4t", "4:1t"), ("4:1t", "8:4t"), ("8:4t", "4:1t 2:1r")),  # float64
}

# Products of tensor cores: (a, b, d) -> shape. "tf32" operands are float32 with 19 significant bits.
_HALF = ("float16", "bfloat16")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_INT8 = ("int8", "uint8")
PRODUCTS = {
    **{(t, t, "float32"): "m16n8k16" for t in _HALF},
    ("float16", "float16", "float16"): "m16n8k16",
    ("tf32", "tf32", "float32"): "m16n8k8",
    **{(a, b, "float32"): "m16n8k32" for a in _FP8 for b in _FP8},
    **{(a, b, "int32"): "m16n8k32" for a in _INT8 for b in _INT8},
    ("float64", "float64", "float64"): "m8n8k4",
}


def shape_for(a: str, b: str, d: str, target: Target) -> str | None:
    """Find the mma shape for operand and accumulator types (dtype names or "tf32"), or None if `target` has none."""
    if a in _FP8 and not target.has_fp8:
        return None
    return PRODUCTS.get((a, b, d))


def mma(d: Address, a: Address, b: Address, shape: str, types: tuple[str, str, str]) -> Do:
    """Build `d += a * b` on fragments in local arrays; `types` of a, b, d are a key of PRODUCTS."""
    return Do(Call("mma", (d, a, b), dt.int32, (shape, *types)))


def ldmatrix(dst: Address, src: Address, count: int, trans: bool = False) -> Do:
    """Load `count` (1, 2, 4) matrices of 8 rows of 16 bytes: lane `l` gives the address of row `l % 8` of matrix `l
    / 8`.

    Lane `l` receives, of each matrix in turn, the 4 bytes at row `l / 4`, 4-byte column `l % 4`; with `trans` (16-bit
    elements, or pairs of bytes) the elements `[2 * (l % 4)][l / 4]` and `[2 * (l % 4) + 1][l / 4]`.
    """
    return Do(Call("ldmatrix", (dst, src), dt.int32, (count, trans)))


def stmatrix(dst: Address, src: Address, count: int, trans: bool = False) -> Do:
    """Store registers to the rows of `count` matrices in shared memory: the inverse of `ldmatrix` (sm_90)."""
    return Do(Call("stmatrix", (dst, src), dt.int32, (count, trans)))


def round_tf32(value: Expr) -> Expr:
    """Round to the nearest float32 that a tf32 operand can hold, halves away from 0."""
    return Call("round_tf32", (value,), dt.float32)


# Effects.


def _mma_effects(call: Call) -> tuple[Access, ...]:
    """Return the register accesses of an mma: a and b are read, d is updated."""
    shape = FRAGMENTS[str(call.options[0])]
    return tuple(
        Access(n, kind, shape.registers(x)) for n, (x, kind) in enumerate((("d", "rw"), ("a", "r"), ("b", "r")))
    )


def _ldmatrix_effects(call: Call) -> tuple[Access, ...]:
    """Return the accesses of ldmatrix: registers written, 16 bytes of shared memory read."""
    return Access(0, "w", elements(call, 0, 4 * option(call))), Access(1, "r", elements(call, 1, 16))


def _stmatrix_effects(call: Call) -> tuple[Access, ...]:
    """Return the accesses of stmatrix: 16 bytes of shared memory written, registers read."""
    return Access(0, "w", elements(call, 0, 16)), Access(1, "r", elements(call, 1, 4 * option(call)))


# Meanings.


def places(digits: tuple[Digits, Digits]) -> tuple[Any, Any]:
    """Return row and column of the element in each lane and register, `[32, registers]`."""
    import numpy as np

    registers = 1 + sum((d.size - 1) * d.stride for dim in digits for d in dim if d.axis == "r")
    lane, register = np.meshgrid(np.arange(32), np.arange(registers), indexing="ij")
    found = []
    for dim in digits:
        index = np.zeros_like(lane)
        for digit in dim:
            axis = lane if digit.axis == "t" else register
            index = index * digit.size + axis // digit.stride % digit.size
        found.append(index)
    return found[0], found[1]


def _mma(a: Any, b: Any, d: Any, options: tuple[object, ...]) -> Any:
    """Compute `d + a @ b` for fragments `[warps, 32, registers]` of wide numbers (float64, int64)."""
    import numpy as np

    shape = FRAGMENTS[str(options[0])]
    if "tf32" in options:
        a, b = (_tf32(x) for x in (a, b))
    matrices = []
    for values, digits, size in ((a, shape.a, (shape.m, shape.k)), (b, shape.b, (shape.k, shape.n))):
        matrix = np.zeros((len(values), *size), values.dtype)
        matrix[(slice(None), *places(digits))] = values
        matrices.append(matrix)
    return d + (matrices[0] @ matrices[1])[(slice(None), *places(shape.d))]


def _tf32(values: Any) -> Any:
    """Round a float32 as the tensor core reads it: drop the lowest 13 bits."""
    import numpy as np

    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(values.dtype)


def _round_tf32(values: Any, options: tuple[object, ...]) -> Any:
    """Add half a unit of the 10th fraction bit to the magnitude and drop what is below; inf and NaN stay."""
    import numpy as np

    x = np.asarray(values, np.float32)
    rounded = ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def _ldmatrix(rows: Any, options: tuple[object, ...]) -> Any:
    """Distribute the 16 bytes at each lane's address, `[warps, 32, elements]`, to registers `[warps, 32, count *
    ...]`.
    """
    count, trans = options
    assert isinstance(count, int)
    warps, _, width = rows.shape
    matrices = rows[:, : 8 * count].reshape(warps, count, 8, width)
    if trans:
        assert width in (8, 16), "ldmatrix transposes 16-bit elements, or pairs of bytes"
        matrices = matrices.reshape(warps, count, 8, 8, width // 8).swapaxes(2, 3)
    parts = matrices.reshape(warps, count, 32, width // 4)
    return parts.swapaxes(1, 2).reshape(warps, 32, count * width // 4)


def _stmatrix(registers: Any, options: tuple[object, ...]) -> Any:
    """Collect registers `[warps, 32, ...]` into the 16 bytes for the address of each of the first `8 * count` lanes."""
    count, trans = options
    assert isinstance(count, int)
    warps, _, total = registers.shape
    width = 4 * total // count
    matrices = registers.reshape(warps, 32, count, width // 4).swapaxes(1, 2).reshape(warps, count, 8, width)
    if trans:
        assert width == 8, "stmatrix transposes 16-bit elements"
        matrices = matrices.swapaxes(2, 3)
    return matrices.reshape(warps, 8 * count, width)


def _matrix_name(call: Call) -> str:
    """Return the C++ name, as `ldmatrix_x4_trans`."""
    return f"{call.name}_x{call.options[0]}" + ("_trans" if call.options[1] else "")


_WARP: dict[str, Any] = {"convergent": "warp"}
declare(
    Intrinsic(
        "mma", 3, same, "", cuda=lambda call: f"mma_{call.options[0]}", header="mma.h", arch=AMPERE,
        effects=_mma_effects, meaning=_mma, **_WARP,
    )
)  # fmt: skip
declare(
    Intrinsic(
        "ldmatrix", 2, same, "", cuda=_matrix_name, header="memory.h", arch=75, effects=_ldmatrix_effects,
        meaning=_ldmatrix, **_WARP,
    )
)  # fmt: skip
declare(
    Intrinsic(
        "stmatrix", 2, same, "", cuda=_matrix_name, header="memory.h", arch=HOPPER, effects=_stmatrix_effects,
        meaning=_stmatrix, **_WARP,
    )
)  # fmt: skip
declare(Intrinsic("round_tf32", 1, same, "", cuda="round_tf32", header="mma.h", arch=AMPERE, meaning=_round_tf32))
