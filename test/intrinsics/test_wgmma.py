# SPDX-License-Identifier: Apache-2.0
"""Which products of warpgroups there are, where their operands lie, and what they touch."""

import pytest

from torch_tile.hardware import Target
from torch_tile.intrinsics import lookup, wgmma
from torch_tile.intrinsics.wgmma import PRODUCTS, Descriptor, allowed_n, step_of
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, const

ALONG, ACROSS = Descriptor(128, 16, 1024), Descriptor(64, 4096, 512, True)


def address(scope, dtype):
    return Address(Buffer("x", (const(64, dt.int32),), dtype, scope), (const(0, dt.int32),))


def call(n, types, a_walk, b_walk):
    operands = (
        address("local", dt.float32),
        address("shared" if a_walk else "local", dt.int8),
        address("shared", dt.int8),
    )
    return wgmma.wgmma(*operands, n, types, a_walk, b_walk).call


@pytest.mark.parametrize("types", PRODUCTS, ids="-".join)
def test_rows_of_k_have_32_bytes(types):
    bits = {"tf32": 32}.get(types[0]) or dt.to_dtype(types[0]).bits
    assert PRODUCTS[types] * bits == 256
    assert step_of(*types, Target("cuda", 90)) == PRODUCTS[types]
    assert step_of(*types, Target("cuda", 120)) == step_of(*types, Target("cuda", 80)) == 0
    assert wgmma.a_registers(call(64, types, None, ALONG)) * bits == 128  # four registers


def test_there_is_no_product_of_other_types():
    for types in (("bfloat16", "float16", "float32"), ("float32",) * 3, ("bfloat16", "bfloat16", "bfloat16")):
        assert step_of(*types, Target("cuda", 90)) == 0


def test_columns():
    assert [n for n in range(300) if allowed_n(n, "float16")] == list(range(8, 257, 8))
    assert [n for n in range(300) if allowed_n(n, "int8")] == [8, 16, 24, *range(32, 257, 16)]


def test_effects():
    def effects(made):
        return [(e.operand, e.kind, e.elements) for e in lookup("wgmma").effects(made)]

    types = ("bfloat16", "bfloat16", "float32")
    assert effects(call(128, types, ALONG, ACROSS)) == [(0, "rw", 64), (1, "r", -1), (2, "r", -1)]
    assert effects(call(8, types, None, ALONG)) == [(0, "rw", 4), (1, "r", 8), (2, "r", -1)]


def test_spelling():
    types = ("float8_e4m3fn", "float8_e5m2", "float32")
    made = call(96, types, None, ALONG)
    assert lookup("wgmma").spelling(made) == "wgmma_m64n96k32_f32_e4m3_e5m2_rs<tile::Walk<128, 16, 1024, false>>"
    assert wgmma.walks_of(made) == (None, ALONG)
    made = call(256, ("float16", "float16", "float16"), ACROSS, ALONG)
    name, _, walks = lookup("wgmma").spelling(made).partition("<")
    assert name == wgmma.product_name(made) == "wgmma_m64n256k16_f16_f16_f16_ss"
    assert walks == "tile::Walk<64, 4096, 512, true>, tile::Walk<128, 16, 1024, false>>"
    assert wgmma.walks_of(made) == (ACROSS, ALONG)
