# SPDX-License-Identifier: Apache-2.0
"""Programs that TileLang refuses and this compiler takes give right numbers, on each target."""

import math

import pytest
import torch

import torch_tile
import torch_tile.language as T


@pytest.mark.parametrize("width", [48, 96])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reductions_of_widths_that_are_no_power_of_two(way, width, op):
    @T.prim_func
    def rows(a: T.Tensor((3, width), "float32"), out: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=width):
            tile, result = T.alloc_fragment((3, width), "float32"), T.alloc_fragment((3,), "float32")
            T.copy(a, tile)
            getattr(T, f"reduce_{op}")(tile, result, dim=1)
            T.copy(result, out)

    @T.prim_func
    def columns(a: T.Tensor((width, 2), "float32"), out: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=2 * width):
            tile, result = T.alloc_fragment((width, 2), "float32"), T.alloc_fragment((2,), "float32")
            T.copy(a, tile)
            getattr(T, f"reduce_{op}")(tile, result, dim=0)
            T.copy(result, out)

    for kernel, shape, dim in ((rows, (3, width), 1), (columns, (width, 2), 0)):
        a, out = torch.randn(shape), torch.full((shape[1 - dim],), math.nan)
        way(kernel, a, out)
        expected = a.double().sum(dim) if op == "sum" else a.double().amax(dim)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_reduction_by_threads_in_the_middle_of_a_warp(way):
    """Threads 16 to 79 hold the tile."""

    @T.prim_func
    def kernel(a: T.Tensor((1, 512), "float32"), out: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=128):
            tile, result = T.alloc_fragment((1, 512), "float32"), T.alloc_fragment((1,), "float32")
            T.annotate_layout(
                {
                    tile: T.Fragment((1, 512), forward_fn=lambda i, j: (16 + j // 8, j % 8)),
                    result: T.Fragment((1,), forward_fn=lambda i, rep: (16 + rep, 0), replicate=64),
                }
            )
            T.copy(a, tile)
            T.reduce_sum(tile, result, dim=1)
            T.copy(result, out)

    a, out = torch.randn(1, 512), torch.full((1,), math.nan)
    way(kernel, a, out)
    torch.testing.assert_close(out.double(), a.double().sum(1), rtol=1e-5, atol=1e-4)


def test_a_serial_sum_of_a_product(way):
    @T.prim_func
    def kernel(a: T.Tensor((64, 32), "float16"), b: T.Tensor((48, 32), "float16"), out: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            left, right = T.alloc_shared((64, 32), "float16"), T.alloc_shared((48, 32), "float16")
            product, total = T.alloc_fragment((64, 48), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(a, left)
            T.copy(b, right)
            T.gemm(left, right, product, transpose_B=True, clear_accum=True)
            T.clear(total)
            for i in T.Parallel(64):
                for j in T.serial(48):
                    total[i] += product[i, j]
            T.copy(total, out)

    a, b, out = torch.randn(64, 32).half(), torch.randn(48, 32).half(), torch.full((64,), math.nan)
    way(kernel, a, b, out)
    torch.testing.assert_close(out.double(), (a.double() @ b.double().T).sum(1), rtol=1e-4, atol=1e-3)


def test_old_values_of_atomic_pairs(way):
    @T.prim_func
    def kernel(a: T.Tensor((2,), "float16"), b: T.Tensor((2,), "float16"), old: T.Tensor((2,), "float16")):
        with T.Kernel(1, threads=1):
            old[0:2] = T.atomic_addx2(a[0:2], b[0:2], return_prev=True)

    before, b, old = torch.randn(2).half(), torch.randn(2).half(), torch.full((2,), math.nan).half()
    a = before.clone()
    way(kernel, a, b, old)
    assert torch.equal(old, before) and torch.equal(a, before + b)


def test_a_tile_written_in_a_loop_of_another_layout(way):
    """The loop gives elements to threads that do not hold them."""
    by_loop = T.Fragment((8, 4), forward_fn=lambda i, j, rep: (i * 4 + rep % 4 + rep // 4 * 32, j), replicate=8)
    by_tile = T.Fragment((8, 4), forward_fn=lambda i, j, rep: (i * 4 + j + rep * 32, 0), replicate=2)

    @T.prim_func
    def kernel(a: T.Tensor((8, 4), "float32"), out: T.Tensor((8, 4), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_fragment((8, 4), "float32")
            T.annotate_layout({tile: by_tile})
            for i, j in T.Parallel(8, 4, loop_layout=by_loop):
                tile[i, j] = a[i, j] * 2
            T.copy(tile, out)

    a, out = torch.randn(8, 4), torch.full((8, 4), math.nan)
    way(kernel, a, out)
    assert torch.equal(out, a * 2)


def test_a_reducer_of_another_layout_than_its_loop(way):
    @T.prim_func
    def kernel(a: T.Tensor((32, 32), "float32"), out: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=128):
            tile, total = T.alloc_fragment((32, 32), "float32"), T.alloc_reducer((32,), "float32", op="sum")
            T.annotate_layout(
                {
                    tile: T.Fragment((32, 32), forward_thread_fn=lambda i, k: i % 16 * 8 + k // 4),
                    total: T.PartialFragment((32,), forward_thread_fn=lambda i, rep: i % 32 * 4 + rep, replicate=4),
                }
            )
            T.copy(a, tile)
            T.reducer_init(total)
            for i, k in T.Parallel(32, 32):
                T.reducer_update(total[i], tile[i, k])
            result = T.alloc_fragment((32,), "float32")
            T.finalize_reducer(total, result)
            T.copy(result, out)

    a, out = torch.randn(32, 32), torch.full((32,), math.nan)
    way(kernel, a, out)
    torch.testing.assert_close(out.double(), a.double().sum(1), rtol=1e-5, atol=1e-5)


def test_a_layout_that_is_no_inverse_of_itself():
    layout = T.Layout([128], lambda i: (i + 1) % 128)
    inverse = layout.inverse()
    assert [inverse.map_forward_index([layout.map_forward_index([n])[0]])[0] for n in range(128)] == list(range(128))


def test_reciprocal_square_roots_of_float64(way):
    @T.prim_func
    def kernel(a: T.Tensor((64,), "float64"), out: T.Tensor((64,), "float64")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                out[i] = T.ieee_frsqrt(a[i])

    a, out = torch.rand(64, dtype=torch.float64) + 0.1, torch.full((64,), math.nan, dtype=torch.float64)
    way(kernel, a, out)
    torch.testing.assert_close(out, a.rsqrt(), rtol=1e-15, atol=0)


def test_grids_of_no_blocks(way):
    n = T.dynamic("n")

    @T.prim_func
    def kernel(a: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
            for i in T.Parallel(32):
                a[bx * 32 + i] = 1.0

    for size in (40, 0):
        a = torch.full((size,), math.nan)
        way(kernel, a)
        assert torch.equal(a, torch.ones(size))


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
def test_products_of_tiles_sized_at_launch(target):
    """Their depth may be known at the launch. A result's size must be known to the compiler."""

    def product(m, n, k):
        @T.prim_func
        def kernel(
            a: T.Tensor((m, k), "float16"),
            b: T.Tensor((k, n), "float16"),
            c: T.Tensor((m, n), "float32"),
        ):
            with T.Kernel(1, threads=128):
                left, right = T.alloc_shared((m, k), "float16"), T.alloc_shared((k, n), "float16")
                result = T.alloc_fragment((m, n), "float32")
                T.copy(a, left)
                T.copy(b, right)
                T.gemm(left, right, result, clear_accum=True)
                T.copy(result, c)

        return torch_tile.compile(kernel, target=target)

    a, b, c = torch.randn(64, 48).half(), torch.randn(48, 32).half(), torch.full((64, 32), math.nan)
    made = product(64, 32, T.dynamic("k"))
    if target == "cpu":
        made(a, b, c)
    else:
        findings = made.interpret(a, b, c)
        assert not findings, findings.report()
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)
    for m, n in ((T.dynamic("m"), 32), (64, T.dynamic("n"))):
        with pytest.raises(torch_tile.TileError, match="known only at run time"):
            product(m, n, 48)


def test_a_bulk_copy_by_a_pointer_without_roles():
    """The block describes the tensor that a pointer names, and copies of it, without a producer warp."""

    @T.prim_func
    def kernel(pointers: T.Tensor((1,), T.ptr), out: T.Tensor((16, 16), "float16")):
        with T.Kernel(1, threads=128):
            source, tile = T.make_tensor(pointers[0], (16, 32), "float16"), T.alloc_shared((16, 16), "float16")
            T.copy(source[0, 8], tile, prefer_instruction="tma")
            T.copy(tile, out)

    options = {torch_tile.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}
    for target in ("cpu", "cuda:sm_90a"):
        made = torch_tile.compile(kernel, target=target, pass_configs=options)
        source, out = torch.randn(16, 32).half(), torch.full((16, 16), math.nan).half()
        if target == "cpu":
            made(torch.tensor([source.data_ptr()]), out)
            assert torch.equal(out, source[:, 8:24])


def test_bulk_additions_of_a_tile_with_a_layout_of_its_own():
    @T.prim_func
    def kernel(out: T.Tensor((16, 16), "float32")):
        with T.Kernel(3, threads=128):
            tile = T.alloc_shared((16, 16), "float32")
            T.annotate_layout({tile: T.make_swizzled_layout(tile)})
            for i, j in T.Parallel(16, 16):
                tile[i, j] = i * 16 + j
            T.atomic_add(out, tile, use_tma=True)

    made, out = torch_tile.compile(kernel, target="cuda:sm_90a"), torch.ones(16, 16)
    findings = made.interpret(out)
    assert not findings, findings.report()
    assert torch.equal(out, 1 + 3 * torch.arange(256.0).view(16, 16))
