# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile.language as T
from torch_tile.diagnostics import TileError
from torch_tile.lowering.check_kernel import check_kernel


def lines(kernel):
    """The code and the author's line of each finding."""
    with pytest.raises(TileError) as caught:
        check_kernel(kernel.program)
    return [(d.code, d.span.source().split("#")[-1].strip()) for d in caught.value.diagnostics]


def test_good_kernels_are_returned_as_they_are(keeps):
    m, n = T.dynamic("m, n")

    @T.prim_func
    def kernel(x: T.Tensor((m, n), "float16"), rows: T.Tensor((m,), "int32")):
        with T.Kernel(m, T.ceildiv(n, 16)) as (b, c):
            tile = T.alloc_shared((4, 16), "float16")
            T.copy(x[b * 4 - 2, c * 16 + 100], tile)  # global regions may lie outside
            T.copy(x[rows[b], c * 16], tile[0, :])
            for k in T.serial(4):
                T.copy(tile[k, 0:8], tile[3 - k, 8:16])
            for i, j in T.Parallel(4, 16):
                T.atomic_add(x[i, j], tile[i, j])
                for k in T.serial(4):
                    if k == i:
                        break

    keeps(check_kernel, kernel)


def test_every_finding_is_reported():
    @T.prim_func
    def kernel(x: T.Tensor((8, 8), "float32"), n: T.int32):
        with T.Kernel(4) as b:
            dynamic = T.alloc_shared((n, 4), "float32")  # size
            tile = T.alloc_shared((4, 4), "float32")
            other = T.alloc_fragment((4, 5), "float32")
            T.copy(tile, other)  # shapes
            T.gemm(x, tile, other)  # global operand
            tile[4, 0] = dynamic[0, 0]  # store
            tile[0, 0] = tile[0, b - 4]  # load
            T.fill(tile[2:6, :], 0)  # region
            for i in T.serial(4):
                T.copy(x[i * i, 0], tile[0, :])  # affine
            for i in T.Parallel(4):
                T.fill(tile[i, :], 0)  # tile op
                if i > 2:
                    break  # leave

    assert lines(kernel) == [
        ("dynamic_tile", "size"), ("copy_shape", "shapes"), ("gemm_scope", "global operand"),
        ("gemm_shape", "global operand"),
        ("out_of_bounds", "store"), ("out_of_bounds", "load"), ("out_of_bounds", "region"),
        ("non_affine_region", "affine"),
        ("unsupported_on_target", "tile op"), ("unsupported_on_target", "leave"),
    ]  # fmt: skip


def test_what_never_runs_is_outside_of_nothing(keeps):
    @T.prim_func
    def kernel(n: T.int32):
        with T.Kernel(4) as b:
            tile = T.alloc_shared((4,), "float32")
            for i in T.serial(3, 3):
                tile[i + 1] = 0.0
            if b > 3:
                tile[b] = 0.0
            if b < 4:
                tile[b] = 0.0
            else:
                tile[b] = 0.0
            if b << 3 == 7:
                tile[b % 1] = 0.0
            for i in T.serial(8):
                if i < 4:
                    tile[i] = T.if_then_else(i >= 1, tile[T.max(i - 1, 0)], 0.0)

    keeps(check_kernel, kernel)


def test_what_all_threads_do_together_is_not_for_some_of_them():
    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(4, threads=256) as b:
            thread = T.get_thread_binding()
            tile, out = T.alloc_shared((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            seen = T.alloc_var("int32", 0)
            if thread < 128:
                T.gemm(tile, tile, out)  # product
                seen = 1
            if seen > 0:
                T.copy(x, tile)  # of a variable
            for i in T.serial(thread // 32):
                for j in T.Parallel(64):  # nest
                    tile[i, j] = 0
            while seen < thread:
                if b > 1:
                    T.fill(tile, 0)  # while
                seen += 1

    places = ("product", "of a variable", "nest", "while")
    assert lines(kernel) == [("parted_threads", place) for place in places]


def test_what_a_thread_does_by_itself_is_for_any(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(4, threads=256) as b:
            thread = T.get_thread_binding()
            tile, own = T.alloc_shared((64, 64), "float32"), T.alloc_local((4,), "float32")
            if thread < 32:
                T.copy(x[thread, 0:4], own)
                T.atomic_add(x[thread, 4], own[0])
                for v in T.vectorized(4):
                    tile[thread, v] = own[v]
            if thread < 256 and n > b:  # all of them, or none
                T.copy(x, tile)
            with T.ws(1):
                if thread >= 128:  # all of the role
                    T.copy(tile, x)

    keeps(check_kernel, kernel)
