# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Stmt
from torch_tile.lowering.common.simplify import simplify_program
from torch_tile.lowering.cpu.lower_tile_ops import lower_tile_ops


def lowered(program):
    """With indices such as 0 + i simplified."""
    return simplify_program(lower_tile_ops(program))


def test_copy_converts(becomes):
    m = T.dynamic("m")

    @T.prim_func
    def before(x: T.Tensor((m, 8), "float16")):
        with T.Kernel(m) as b:
            tile = T.alloc_shared((8,), "float32")
            T.copy(x[b, 0:8], tile)
            T.copy(tile[2:6], x[b, 4])

    @T.prim_func
    def after(x: T.Tensor((m, 8), "float16")):
        with T.Kernel(m) as b:
            tile = T.alloc_shared((8,), "float32")
            for i in T.Parallel(8):
                tile[i] = T.cast(x[b, i], "float32")
            for i in T.Parallel(4):
                x[b, i + 4] = T.cast(tile[i + 2], "float16")

    becomes(lowered, before, after)


def test_fill_and_gemm(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((8, 4), "float16")
            b = T.alloc_shared((8, 4), "float16")
            c = T.alloc_fragment((4, 4), "float32")
            T.gemm(a, b, c, transpose_A=True, clear_accum=True)
            T.fill(x[1, :], 2)

    @T.prim_func
    def after(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((8, 4), "float16")
            b = T.alloc_shared((8, 4), "float16")
            c = T.alloc_fragment((4, 4), "float32")
            for i, j in T.Parallel(4, 4):
                c[i, j] = T.float32(0.0)
            where = [T.address_of(t[0, 0]) for t in (a, b, c)]
            T.evaluate(T.call("cpu_gemm", where[0], 4, where[1], 4, where[2], 4, 4, 4, 8, options=(True, False)))
            for i in T.Parallel(4):
                x[1, i] = T.float32(2.0)

    becomes(lowered, before, after)


def test_printed_regions(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            T.print(x[1:3, 2], msg="part")
            T.print(x[0, 0])

    @T.prim_func
    def after(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(2):
                T.print(x[i + 1, 2], msg="part x")
            T.print(x[0, 0])

    becomes(lowered, before, after)


def test_nothing_to_do(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                x[i] = x[i] + 1.0

    keeps(lower_tile_ops, kernel)


def test_roles_are_for_gpus():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=64) as _, T.role(0, 32):
            x[0] = 1.0

    with pytest.raises(TileError, match=r"T\.role is not supported on target cpu") as caught:
        lower_tile_ops(kernel.program)
    assert caught.value.code == "unsupported_on_target" and "T.role(0, 32)" in caught.value.span.source()


def test_every_statement_keeps_the_authors_line():
    @T.prim_func
    def kernel(x: T.Tensor((4, 4), "float32"), out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((4, 4), "float32")
            T.copy(x, tile)
            T.cumsum(tile, dim=1)
            T.reduce_sum(tile, out, dim=0)

    seen = set()
    for top in lower_tile_ops(kernel.program).kernels[0].body.stmts:
        names = {node.span.source().strip() for node in walk(top) if isinstance(node, Stmt)}
        assert len(names) == 1, names
        seen |= names
    assert [name.split("(")[0].split(" ")[-1] for name in sorted(seen)] == [
        "T.copy", "T.cumsum", "T.reduce_sum", "T.alloc_fragment"
    ]  # fmt: skip
