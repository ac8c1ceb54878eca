# SPDX-License-Identifier: Apache-2.0

import inspect
import math
import re
from pathlib import Path

import pytest

import torch_tile.language as T
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Load, Var, const
from torch_tile.ir.layout import Digit, Layout, row_major, shared_tile
from torch_tile.ir.node import equal
from torch_tile.ir.stmt import TileOp
from torch_tile.tileop import RegisteredOp, tile_ops
from torch_tile.tileop.base import (
    aligned_run,
    describe,
    identity_of,
    region_of,
    same_extents,
    spread,
    squeezed,
    tile_op,
)

ONE = const(1, dt.int32)
A = Buffer("A", (const(4, dt.int32), const(6, dt.int32)), dt.float32, "shared")


@pytest.mark.every_sample
@pytest.mark.parametrize("name", tile_ops())
def test_every_op_is_complete(name):
    """A check, what it touches, a meaning and a way to the CPU, each its own; a name in the language; a docstring."""
    op = tile_ops()[name]
    for method in ("build", "check", "accesses", "lower_cpu", "evaluate"):
        assert getattr(op, method) not in (getattr(RegisteredOp, method, None), getattr(TileOp, method, None)), method
    assert op.op_name == name and callable(getattr(T, name))
    assert op.__doc__ and op.build.__doc__


def test_the_how_to_names_every_method_without_a_default():
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    how_to = re.split(r"^## ", text.partition("## Adding a tile op")[2], maxsplit=1, flags=re.M)[0]
    wanted = [
        name
        for name, method in vars(RegisteredOp).items()
        if not name.startswith("_") and re.search(r"raise (NotImplementedError|self\._lacks)", source_of(method))
    ]
    assert len(wanted) >= 6
    assert [name for name in [*wanted, "evaluate"] if f"`{name}`" not in how_to] == []


def source_of(method):
    method = getattr(method, "__func__", method)
    return inspect.getsource(method) if inspect.isfunction(method) else ""


def test_a_name_is_declared_once():
    with pytest.raises(ValueError, match="copy is declared twice"):
        tile_op("copy")(RegisteredOp)


def test_regions():
    i = Var("i", role="loop")
    assert region_of(A).extents == A.shape
    element = region_of(Load(A, (i, ONE)))
    assert element.tile_shape == () and describe(element.extents) == "(1, 1)"
    assert region_of(3.0) is None
    row = Region(A, (Range(i, ONE), Range(const(2, dt.int32), const(3, dt.int32))))
    assert describe(squeezed(row)) == "(3)"
    j = Var("j", role="loop")
    indices = spread(row, (j,))
    assert indices[0] is i and equal(indices[1], const(2, dt.int32) + j)


def test_same_extents():
    n = Var("n", role="dim")
    assert same_extents((n, ONE), (n, const(1, dt.int64)))
    assert same_extents((n + 1,), (n + 1,))
    assert not same_extents((n,), (Var("n", role="dim"),))
    assert not same_extents((ONE,), (ONE, ONE))


@pytest.mark.parametrize("dtype", dt.ALL, ids=str)
def test_identities(dtype):
    assert identity_of("sum", dtype).value == 0
    if dtype.kind == "bool":
        assert identity_of("max", dtype).value is False and identity_of("min", dtype).value is True
    elif dtype.is_integer:
        low, high = identity_of("max", dtype).value, identity_of("min", dtype).value
        assert high - low == (1 << dtype.bits) - 1 and identity_of("bitand", dtype).value in (-1, high)
    else:
        top = 448.0 if dtype.name == "float8_e4m3fn" else math.inf
        assert identity_of("max", dtype).value == -top and identity_of("min", dtype).value == top


@pytest.mark.parametrize(
    ("shape", "layout", "run"),
    [
        ((64, 64), shared_tile((64, 64), 16), 8),  # the swizzle moves 16 bytes
        ((3, 32, 16), shared_tile((3, 32, 16), 32), 4),
        ((9, 65), row_major((9, 65)), 65),
        ((9, 72), None, 72),
        ((4, 8), Layout(((Digit(4, 12, "m"),), (Digit(8, 1, "m"),))), 4),  # rows of 8, 12 apart
        ((8, 8), Layout(((Digit(8, 1, "m"),), (Digit(8, 8, "m"),))), 1),
    ],
)
def test_runs(on_threads, shape, layout, run: int) -> None:
    assert aligned_run(on_threads.buffer("x", shape, dt.float16, "shared", layout)) == run
