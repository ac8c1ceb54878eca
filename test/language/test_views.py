# SPDX-License-Identifier: Apache-2.0
"""T.view and T.reshape of tiles, and by other dtypes."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


@pytest.mark.parametrize("scope", ["shared", "local.fragment"])
@pytest.mark.parametrize("shapes", [((64,), (8, 8)), ((4, 16), (16, 4)), ((2, 1, 32), (2, 32)), ((6, 10), (3, 4, 5))])
def test_tiles_by_another_shape(scope, shapes, way):
    first, second = shapes

    @T.prim_func
    def kernel(A: T.Tensor(first, "float32"), B: T.Tensor(second, "float32"), C: T.Tensor(first, "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_buffer(first, "float32", scope=scope)
            other = T.reshape(tile, second)
            T.copy(A, tile)
            T.copy(other, B)
            for i, j in T.Parallel(second[0], second[-1]):
                if len(second) == 2:
                    other[i, j] = other[i, j] + 1
                else:
                    other[i, 1, j] = other[i, 1, j] * 2
            T.copy(T.view(other, first), C)

    a, b, c = torch.randn(first), torch.zeros(second), torch.zeros(first)
    way(kernel, a, b, c)
    wanted = a.reshape(second).clone()
    assert torch.equal(b, wanted)
    if len(second) == 2:
        wanted += 1
    else:
        wanted[:, 1] *= 2
    assert torch.equal(c, wanted.reshape(first))


def test_products_of_reshaped_tiles(way):
    @T.prim_func
    def kernel(A: T.Tensor((2, 32, 64), "float16"), B: T.Tensor((64, 32), "float16"), C: T.Tensor((64, 32), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((2, 32, 32), "float16")
            b = T.alloc_shared((1, 32, 32), "float16")
            c = T.alloc_fragment((64, 32), "float32")
            rows = T.reshape(a, (64, 32))
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[:, :, k * 32 : k * 32 + 32], a)
                T.copy(B[k * 32, 0], T.view(b, (32, 32)))
                T.gemm(rows, T.reshape(b, (32, 32)), c)
            T.copy(c, C)

    a, b, c = torch.randn(2, 32, 64).half(), torch.randn(64, 32).half(), torch.zeros(64, 32)
    way(kernel, a, b, c)
    torch.testing.assert_close(c, a.float().reshape(64, 64) @ b.float(), rtol=1e-3, atol=1e-3)


def test_reductions_of_a_view(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((64,), "float32")
            total = T.alloc_fragment((8,), "float32")
            T.copy(A, tile)
            T.reduce_sum(T.view(tile, (8, 8)), total, dim=1)
            T.copy(total, B)

    a, b = torch.randn(64), torch.zeros(8)
    way(kernel, a, b)
    torch.testing.assert_close(b, a.view(8, 8).sum(1))


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_a_role_reduces_a_view_of_its_own_fragment(target):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_fragment((64,), "float32")
            total = T.alloc_fragment((8,), "float32")
            for group in (0, 1):
                with T.ws(group):
                    T.copy(A, tile)
                    T.reduce_sum(T.view(tile, (8, 8)), total, dim=group)
                    T.copy(total, B[group, :])

    a, b = torch.randn(64), torch.zeros(2, 8)
    findings = torch_tile.compile(kernel, target=target).interpret(a, b)
    assert not findings, findings.report()
    torch.testing.assert_close(b, torch.stack([a.view(8, 8).sum(0), a.view(8, 8).sum(1)]))


@pytest.mark.parametrize("scope", ["shared", "local.fragment", "local"])
@pytest.mark.parametrize(
    "dtypes", [("float32", "int32"), ("float16", "uint16"), ("bfloat16", "int16"), ("int8", "uint8")]
)
def test_tiles_by_a_dtype_of_the_same_width(scope, dtypes, way):
    one, other = dtypes

    @T.prim_func
    def kernel(A: T.Tensor((64,), one), B: T.Tensor((64,), other)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_buffer((64,), one, scope=scope)
            bits = T.view(tile, dtype=other)
            if scope == "local":
                for i in T.serial(64):
                    tile[i] = A[i]
                for i in T.serial(64):
                    bits[i] = bits[i] ^ 1
                for i in T.serial(64):
                    B[i] = bits[i]
            else:
                T.copy(A, tile)
                for i in T.Parallel(64):
                    bits[i] = bits[i] ^ 1
                T.copy(bits, B)

    whole = T.dtype(other).as_torch()
    a, b = (torch.randn(64) * 20).to(T.dtype(one).as_torch()), torch.zeros(64, dtype=whole)
    way(kernel, a, b)
    signed = getattr(torch, f"int{T.dtype(one).bits}")
    assert torch.equal(b.view(signed), a.view(signed) ^ 1)


@pytest.mark.parametrize("wide", ["float16", "float32", "float64"])
def test_bytes_as_wider_elements(wide, way):
    """Memory that was allocated as bytes is written and read by a wider dtype."""
    size = T.dtype(wide).bits // 8

    @T.prim_func
    def kernel(A: T.Tensor((32,), wide), B: T.Tensor((32 * size,), "uint8"), C: T.Tensor((32,), wide)):
        with T.Kernel(1, threads=32):
            memory = T.alloc_shared((32 * size,), "uint8")
            values = T.view(memory, (4, 8), wide)
            for i, j in T.Parallel(4, 8):
                values[i, j] = A[i * 8 + j]
            T.copy(memory, B)
            T.copy(T.reshape(values, (32,)), C)

    dtype = T.dtype(wide).as_torch()
    a, b, c = torch.randn(32).to(dtype), torch.zeros(32 * size, dtype=torch.uint8), torch.zeros(32, dtype=dtype)
    way(kernel, a, b, c)
    assert torch.equal(b, a.view(torch.uint8)) and torch.equal(c, a)


@pytest.mark.parametrize(
    ("of", "to"), [("float32", "uint8"), ("uint8", "int32"), ("float16", "float32"), ("int32", "float32")]
)
def test_tensors_by_another_dtype(of, to, way):
    source, into = T.dtype(of).as_torch(), T.dtype(to).as_torch()
    count = 128 * T.dtype(of).bits // T.dtype(to).bits
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n, 128), of), B: T.Tensor((n, count), to)):
        with T.Kernel(n, threads=32) as bx:
            other = T.view(A, dtype=to)
            part = T.alloc_fragment((count,), to)
            T.copy(other[bx, :], part)
            T.copy(part, B[bx, 0])

    a = torch.randint(0, 127, (3, 128 * source.itemsize), dtype=torch.uint8).view(source)
    b = torch.zeros(3, count, dtype=into)
    way(kernel, a, b)
    assert torch.equal(b.view(torch.uint8), a.view(torch.uint8))


def test_bytes_as_packed_elements(way):
    @T.prim_func
    def kernel(A: T.Tensor((32,), "uint8"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32,), "uint8")
            T.copy(A, tile)
            nibbles = T.view(tile, (64,), "int4")
            for i in T.Parallel(64):
                B[i] = nibbles[i]

    a, b = torch.randint(0, 256, (32,)).to(torch.uint8), torch.zeros(64, dtype=torch.int32)
    way(kernel, a, b)
    parts = torch.stack([a & 15, a >> 4], -1).flatten().int()
    assert torch.equal(b, torch.where(parts > 7, parts - 16, parts))


def test_what_lies_outside_a_view_of_a_tensor_is_zero(way):
    @T.prim_func
    def kernel(A: T.Tensor((4, 16), "float32"), B: T.Tensor((4, 32), "int32")):
        with T.Kernel(1, threads=32):
            bits = T.view(A, (4, 16), "int32")
            for i, j in T.Parallel(4, 32):
                B[i, j] = bits[i, j - 8]

    a, b = torch.randn(4, 16), torch.full((4, 32), 7, dtype=torch.int32)
    way(kernel, a, b)
    assert torch.equal(b, torch.nn.functional.pad(a.view(torch.int32), (8, 8)))


@pytest.mark.parametrize("scope", ["shared", "local.fragment"])
def test_sums_of_two_shapes_of_a_tile(scope, way):
    """The second sum is over a box that the tile's own shape does not have."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 32), "float32"), S: T.Tensor((16,), "float32"), P: T.Tensor((16, 4), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_buffer((16, 32), "float32", scope=scope)
            total, parts = T.alloc_fragment((16,), "float32"), T.alloc_fragment((16, 4), "float32")
            T.copy(A, tile)
            T.reduce_sum(tile, total)
            T.reduce_sum(T.view(tile, (16, 4, 8)), parts, dim=-1)
            T.copy(total, S)
            T.copy(parts, P)

    a, s, p = torch.randn(16, 32), torch.full((16,), torch.nan), torch.full((16, 4), torch.nan)
    way(kernel, a, s, p)
    torch.testing.assert_close(s, a.double().sum(1).float())
    torch.testing.assert_close(p, a.double().view(16, 4, 8).sum(2).float())


def wrong(make, scope="shared"):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            make(A, T.alloc_buffer((8, 8), "float32", scope=scope))


def narrow_store(A, tile):
    bytes_ = T.view(tile, dtype="uint8")
    T.copy(A, T.view(tile, (64,)))
    small, total = T.alloc_fragment((8, 8), "float32"), T.alloc_fragment((8,), "float32")
    T.reduce_sum(tile, total)
    T.clear(small)
    for i in T.Parallel(8):
        bytes_[i, 0] = 1


def two_shapes(A, tile):
    T.cumsum(tile)
    T.cumsum(T.view(tile, (4, 16)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda A, tile: T.view(tile, (9, 7)), "is \\(9, 7\\)"),
        (lambda A, tile: T.view(tile, (64,), "float16"), "as many bytes"),
        (lambda A, tile: T.view(tile[0:4, :], (32,)), "part of a buffer"),
        (lambda A, tile: T.view(tile, (64,), "bool"), "no bits"),
        (narrow_store, "elements share one"),
        (two_shapes, "no such box"),
    ],
)
def test_views_that_cannot_be(make, why):
    with pytest.raises(TileError, match=why) as caught:
        wrong(make)
    assert caught.value.code == "bad_argument"


def test_a_reshaped_tile_is_still_copied_as_a_tile():
    """Dimensions of size 1 cost nothing: copies and products see the tile itself."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((1, 64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k : k + 1, 0:64, 0:64], a)
                T.gemm(T.reshape(a, (64, 64)), T.view(a, (64, 64)), c)
            T.copy(c, C)

    text = torch_tile.compile(kernel, target="cuda:sm_90a").get_kernel_source()
    assert "cp_async" in text or "tma" in text


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_copies_whose_shapes_differ(dtype):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4, 6), dtype)):
            with T.Kernel(1):
                tile = T.alloc_fragment((4, 6), dtype)
                T.copy(A, T.reshape(tile, (24,)))

    assert caught.value.code == "copy_shape"


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("keeps", [False, True])
def test_sizes_of_one_in_a_reduction(way, groups, keeps):
    """A view's dimensions of size 1 count for `dim`, also where the tile itself lacks them."""
    shape = (8, groups, 1) if keeps else (8, groups)

    @T.prim_func
    def kernel(A: T.Tensor((8, 128), "float32"), B: T.Tensor((8, groups), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((8, 128), "float32")
            total = T.alloc_fragment((8,), "float32")
            most = T.alloc_fragment(shape, "float32")
            T.copy(A, x)
            T.reduce_max(T.reshape(x, [8, groups, 128 // groups]), most, dim=2)
            if groups == 1:  # a second shape that an operation needs
                T.reduce_sum(x, total, dim=1)
                T.copy(total, C)
            for i, j in T.Parallel(8, groups):
                B[i, j] = most[i, j, 0] if keeps else most[i, j]

    a, b, c = torch.randn(8, 128), torch.zeros(8, groups), torch.zeros(8)
    way(kernel, a, b, c)
    assert torch.equal(b, a.view(8, groups, -1).amax(-1))
    torch.testing.assert_close(c, a.sum(1) if groups == 1 else c, rtol=1e-4, atol=1e-4)


def test_a_size_of_one_is_not_reduced_by_another_shape():
    with pytest.raises(TileError, match="dimension of size 1"):

        @T.prim_func
        def kernel(A: T.Tensor((128,), "float32")):
            with T.Kernel(1, threads=128):
                x, y = T.alloc_fragment((4, 32), "float32"), T.alloc_fragment((4, 32), "float32")
                z = T.alloc_fragment((4,), "float32")
                T.clear(x)
                T.reduce_sum(x, z, dim=1)
                T.reduce_sum(T.reshape(x, [4, 1, 32]), y, dim=1)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_view_that_nothing_uses_needs_no_tensor(weighted):
    """An option decides while tracing whether a parameter is read, by another shape; else it may be None."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), W: T.Tensor((8, 8), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            flat, spare = T.reshape(W, (64,)), T.alloc_shared((64 if weighted else 0,), "float32")
            if weighted:
                T.copy(flat, spare)
            for i in T.Parallel(64):
                B[i] = T.reshape(A, (64,))[i] * (spare[i] if weighted else 1)

    a, w, b = torch.randn(8, 8), torch.randn(8, 8), torch.zeros(64)
    torch_tile.compile(kernel, target="cpu")(a, w if weighted else None, b)
    torch.testing.assert_close(b, (a * w if weighted else a).flatten())
    findings = torch_tile.compile(kernel, target="cuda:sm_80").interpret(a, w if weighted else None, b.zero_())
    assert not findings
    torch.testing.assert_close(b, (a * w if weighted else a).flatten())


def test_a_tile_of_no_elements_is_not_used():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((0,), "float32")
            A[0] = tile[0]

    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target="cpu")
    assert caught.value.code == "bad_shape"


@pytest.mark.parametrize("made", ["view", "reducer"])
def test_what_tilelang_asserts_is_an_assertion(made):
    """So that tests which expect an AssertionError of TileLang's find one."""
    with pytest.raises(AssertionError, match={"view": "as many elements", "reducer": "integer dtype"}[made]) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((1024,), "float32")):
            with T.Kernel(1):
                if made == "view":
                    T.view(A, (32, 33))
                else:
                    T.alloc_reducer((1,), "float32", op="bitand")

    assert isinstance(caught.value, TileError)
