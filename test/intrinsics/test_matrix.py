# SPDX-License-Identifier: Apache-2.0
"""The declared places of matrix operands against the formulas of the PTX manual, and the meanings against matmul."""

from __future__ import annotations

import numpy as np
import pytest

from torch_tile.intrinsics import lookup
from torch_tile.intrinsics.matrix import FRAGMENTS, PRODUCTS, mma, places
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, const

# Row and column of register v of lane l, as the PTX manual writes them (l / 4 is its groupID).
TABLES = {
    ("m16n8k16", "a"): lambda l, v: (l // 4 + 8 * (v // 2 % 2), 2 * (l % 4) + v % 2 + 8 * (v // 4)),
    ("m16n8k16", "b"): lambda l, v: (2 * (l % 4) + v % 2 + 8 * (v // 2), l // 4),
    ("m16n8k32", "a"): lambda l, v: (l // 4 + 8 * (v // 4 % 2), 4 * (l % 4) + v % 4 + 16 * (v // 8)),
    ("m16n8k32", "b"): lambda l, v: (4 * (l % 4) + v % 4 + 16 * (v // 4), l // 4),
    ("m16n8k8", "a"): lambda l, v: (l // 4 + 8 * (v % 2), l % 4 + 4 * (v // 2)),
    ("m16n8k8", "b"): lambda l, v: (l % 4 + 4 * v, l // 4),
    ("m8n8k4", "a"): lambda l, v: (l // 4, l % 4),
    ("m8n8k4", "b"): lambda l, v: (l % 4, l // 4),
    ("m8n8k4", "d"): lambda l, v: (l // 4, 2 * (l % 4) + v),
    **{
        (shape, "d"): lambda l, v: (l // 4 + 8 * (v // 2), 2 * (l % 4) + v % 2)
        for shape in ("m16n8k16", "m16n8k32", "m16n8k8")
    },
}  # fmt: skip


@pytest.mark.parametrize(("shape", "operand"), TABLES)
def test_places(shape: str, operand: str) -> None:
    found = places(getattr(FRAGMENTS[shape], operand))
    registers = FRAGMENTS[shape].registers(operand)
    assert found[0].shape == (32, registers)
    for lane in range(32):
        for v in range(registers):
            assert (found[0][lane, v], found[1][lane, v]) == TABLES[shape, operand](lane, v)


@pytest.mark.parametrize(("types", "shape"), PRODUCTS.items())
def test_mma_is_a_product(types: tuple[str, str, str], shape: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    s = FRAGMENTS[shape]
    a, b, d = (rng.integers(-9, 10, (3, *size)).astype(float) for size in ((s.m, s.k), (s.k, s.n), (s.m, s.n)))
    fragments = [x[(slice(None), *places(digits))] for x, digits in ((a, s.a), (b, s.b), (d, s.d))]
    result = np.full_like(d, np.nan)
    result[(slice(None), *places(s.d))] = lookup("mma").meaning(*fragments, (shape, *types))
    np.testing.assert_array_equal(result, d + a @ b)


def test_tf32_drops_low_bits() -> None:
    ones = np.ones((1, 32, 4))
    exact = lookup("mma").meaning(ones + 2**-20, ones[..., :2], 0 * ones, ("m16n8k8", "tf32", "tf32", "float32"))
    assert (exact == 8).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "trans"), [(np.int16, False), (np.int16, True), (np.int8, False), (np.int32, False)])
def test_ldmatrix_and_back(count: int, dtype: type, trans: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = 16 // np.dtype(dtype).itemsize
    rows = rng.integers(-99, 99, (2, 32, width)).astype(dtype)
    registers = lookup("ldmatrix").meaning(rows, (count, trans))
    each = width // 4
    assert registers.shape == (2, 32, count * each)
    for lane in range(32):
        for j in range(count):
            got = registers[1, lane, j * each : (j + 1) * each]
            if trans:
                want = [rows[1, 8 * j + 2 * (lane % 4) + e, lane // 4] for e in range(2)]
            else:
                want = rows[1, 8 * j + lane // 4, each * (lane % 4) : each * (lane % 4 + 1)]
            np.testing.assert_array_equal(got, want)
    back = lookup("stmatrix").meaning(registers, (count, trans))
    np.testing.assert_array_equal(back, rows[:, : 8 * count])


def test_effects_and_spelling() -> None:
    local = Buffer("r", (const(64, dt.int32),), dt.float16, "local")
    shared = Buffer("s", (const(64, dt.int32),), dt.float16, "shared")
    zero = (const(0, dt.int32),)
    call = mma(Address(local, zero), Address(local, zero), Address(shared, zero), "m16n8k16", ("float16",) * 3).call
    assert [(x.operand, x.kind, x.elements) for x in lookup("mma").effects(call)] == [
        (0, "rw", 4),
        (1, "r", 8),
        (2, "r", 4),
    ]
    assert lookup("mma").spelling(call) == "mma_m16n8k16"
