# SPDX-License-Identifier: Apache-2.0
"""Narrow types: int4, int2, float4_e2m1fn, float8_e4m3fnuz, float8_e5m2fnuz, float8_e8m0fnu and tfloat32."""

import itertools
import math

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError
from torch_tile.ir.dtype import NARROW, rounded

FLOATS = [t for t in NARROW if t.is_float]
EIGHT = [t for t in FLOATS if t.bits == 8]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def bytes_of(dtype, *shape):
    """A tensor of zeros for so many elements."""
    count = max(1, 8 // dtype.bits)
    if dtype.bits == 32:
        return torch.zeros(shape)
    return torch.zeros(*shape[:-1], shape[-1] // count, dtype=torch.uint8).view(dtype.as_torch())


def pack(values, bits):
    """Integers as bytes of several of them, the first lowest."""
    count = 8 // bits
    parts = (values.int() & ((1 << bits) - 1)).unflatten(-1, (-1, count))
    return sum(parts[..., k] << (bits * k) for k in range(count)).to(torch.uint8)


def unpack(packed, bits, signed):
    parts = [(packed.view(torch.uint8).int() >> (bits * k)) & ((1 << bits) - 1) for k in range(8 // bits)]
    found = torch.stack(parts, -1).flatten(-2)
    return torch.where(found >= 1 << (bits - 1), found - (1 << bits), found) if signed else found


def awkward(dtype):
    """Numbers at and between the values of a type, and far outside."""
    ties = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 7.0, 1e9, -1e9, math.inf, 2.0**-128])
    small = torch.randn(80) * (1e-3 if dtype.bits == 8 else 1)
    return torch.cat([ties, torch.randn(80) * 3, small, torch.randn(81) * 300])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_names_and_widths(dtype):
    assert getattr(T, dtype.name) is dtype and dtype == dtype.name and T.dtype(dtype.name) is dtype
    assert dtype.bits == {"int2": 2, "uint2": 2, "tfloat32": 32}.get(
        dtype.name, 4 if "4_" in dtype or "t4" in dtype else 8
    )
    assert isinstance(dtype.as_torch(), torch.dtype) and dtype.itemsize == max(1, dtype.bits // 8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_rounded_and_saturate(dtype, way):
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), dtype), C: T.Tensor((256,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            wide = T.alloc_fragment((128,), "float32")
            narrow = T.alloc_fragment((128,), dtype)
            tile = T.alloc_shared((128,), dtype)
            T.copy(A[bx * 128], wide)
            T.copy(wide, narrow)
            T.copy(narrow, B[bx * 128])
            T.copy(B[bx * 128], tile)
            for i in T.Parallel(128):
                C[bx * 128 + i] = tile[i]

    a, b, c = awkward(dtype), bytes_of(dtype, 256), torch.zeros(256)
    way(kernel, a, b, c)
    wanted = torch.tensor([rounded(x, dtype) for x in a.tolist()])
    torch.testing.assert_close(c, wanted, rtol=0, atol=0, equal_nan=True)
    if dtype.bits == 8:
        torch.testing.assert_close(b.float(), wanted, rtol=0, atol=0, equal_nan=True)
        torchs = a.to(dtype.as_torch()).float()  # which gives NaN where the types saturate
        inside = torchs.isfinite() & (a.abs() >= 2.0**-126)
        assert torch.equal(torchs[inside], c[inside])


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_all_codes_of_eight_bits(dtype, way):
    @T.prim_func
    def kernel(A: T.Tensor((256,), dtype), B: T.Tensor((256,), "float32"), C: T.Tensor((256,), dtype)):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((256,), dtype)
            T.copy(A, tile)
            T.copy(tile, B)
            T.copy(tile, C)

    a = torch.arange(256, dtype=torch.uint8).view(dtype.as_torch())
    b, c = torch.zeros(256), bytes_of(dtype, 256)
    way(kernel, a, b, c)
    torch.testing.assert_close(b, a.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(c.view(torch.uint8), a.view(torch.uint8))


def test_all_codes_of_four_bits(way):
    @T.prim_func
    def kernel(A: T.Tensor((4, 16), "float4_e2m1fn"), B: T.Tensor((4, 16), "float16"), C: T.Tensor((4, 16), "uint8")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((4, 16), "float4_e2m1fn")
            T.copy(A, tile)
            for i, j in T.Parallel(4, 16):
                B[i, j] = tile[i, j] * 1.0
                C[i, j] = T.cast(T.reinterpret(tile[i, j], "uint4"), "uint8")

    codes = torch.stack([torch.randperm(16) for _ in range(4)])
    b, c = torch.zeros(4, 16, dtype=torch.float16), torch.zeros(4, 16, dtype=torch.uint8)
    way(kernel, pack(codes, 4).view(torch.float4_e2m1fn_x2), b, c)
    assert torch.equal(b, torch.tensor(FP4, dtype=torch.float16)[codes]) and torch.equal(c.long(), codes)


@pytest.mark.parametrize("dtype", [t for t in NARROW if t.bits < 8 and not t.is_float], ids=str)
def test_packed_integers_wrap(dtype, way):
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(A: T.Tensor((rows, 32), dtype), B: T.Tensor((rows, 32), "int32"), C: T.Tensor((rows, 32), dtype)):
        with T.Kernel(rows, threads=32) as bx:
            tile = T.alloc_shared((32,), dtype)
            T.copy(A[bx, 0], tile)
            for j in T.Parallel(32):
                B[bx, j] = tile[j]
            for j in T.Parallel(32):
                C[bx, j] = tile[j] * tile[j] - 3

    signed, bits = dtype.kind == "int", dtype.bits
    values = torch.randint(0, 1 << bits, (5, 32)) - ((1 << (bits - 1)) if signed else 0)
    a, b, c = pack(values, bits).view(dtype.as_torch()), torch.zeros(5, 32, dtype=torch.int32), bytes_of(dtype, 5, 32)
    way(kernel, a, b, c)
    assert torch.equal(b.long(), values)
    assert torch.equal(unpack(c, bits, signed), unpack(pack(values * values - 3, bits), bits, signed))


def test_operators_round_each_result(way):
    @T.prim_func
    def kernel(
        A: T.Tensor((256,), "float8_e4m3fnuz"), B: T.Tensor((256,), "float8_e4m3fnuz"), C: T.Tensor((3, 256), "float32")
    ):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(256):
                C[0, i] = A[i] + B[i]
                C[1, i] = T.max(A[i], B[i]) if A[i] < B[i] else -A[i]
                C[2, i] = A[i] * T.cast(B[i], "float32")

    fnuz = torch.float8_e4m3fnuz
    a, b, c = torch.randn(256).to(fnuz), torch.randn(256).to(fnuz), torch.zeros(3, 256)
    way(kernel, a, b, c)
    x, y = a.float(), b.float()
    wanted = [(x + y).to(fnuz).float(), torch.where(x < y, y, (-x).to(fnuz).float()), x * y]
    torch.testing.assert_close(c, torch.stack(wanted), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "into"), [("int4", "int32"), ("float4_e2m1fn", "float32"), ("float8_e5m2fnuz", "float32")], ids=str
)
def test_products(dtype, into, way):
    m, n, k = 32, 32, 64

    @T.prim_func
    def kernel(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k), dtype), C: T.Tensor((m, n), into)):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((m, 32), dtype)
            b = T.alloc_shared((n, 32), dtype)
            c = T.alloc_fragment((m, n), into)
            T.clear(c)
            for step in T.Pipelined(k // 32, num_stages=2):
                T.copy(A[0, step * 32], a)
                T.copy(B[0, step * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    if T.dtype(dtype).bits == 4:
        codes = [torch.randint(0, 16, (r, k)) for r in (m, n)]
        a, b = (pack(x, 4).view(T.dtype(dtype).as_torch()) for x in codes)
        if dtype == "int4":
            x, y = (torch.where(v > 7, v - 16, v).float() for v in codes)
        else:
            x, y = (torch.tensor(FP4)[v] for v in codes)
    else:
        a, b = (torch.randn(r, k).to(T.dtype(dtype).as_torch()) for r in (m, n))
        x, y = a.float(), b.float()
    c = torch.zeros(m, n, dtype=T.dtype(into).as_torch())
    way(kernel, a, b, c)
    torch.testing.assert_close(c.float(), x @ y.mT, rtol=1e-5, atol=1e-4)


def test_tensors_are_made_and_sizes_learnt():
    @torch_tile.jit(target="cpu")
    def halve(A):
        M, N = T.const("M N")
        A: T.Tensor((M, N), "float4_e2m1fn")
        B = T.empty((M, N), "float4_e2m1fn")
        with T.Kernel(M, threads=32) as bx:
            tile = T.alloc_fragment((N,), "float4_e2m1fn")
            T.copy(A[bx, 0], tile)
            for j in T.Parallel(N):
                tile[j] = tile[j] * 0.5
            T.copy(tile, B[bx, 0])
        return B

    half = torch.tensor([rounded(x / 2, T.float4_e2m1fn) for x in FP4])
    for shape in ((3, 8), (3, 8), (2, 16)):
        codes = torch.randint(0, 16, shape)
        found = halve(pack(codes, 4).view(torch.float4_e2m1fn_x2))
        assert found.dtype == torch.float4_e2m1fn_x2 and found.shape == (shape[0], shape[1] // 2)
        assert torch.equal(torch.tensor(FP4)[unpack(found, 4, False)], half[codes])


def test_lengths_are_learnt_from_bytes(way):
    n = T.dynamic("n", multiple_of=2)

    @T.prim_func
    def kernel(A: T.Tensor((n,), "int4"), B: T.Tensor((n,), "int8")):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = T.cast(A[bx * 32 + i], "int8")

    values = torch.randint(-8, 8, (50,))
    b = torch.zeros(50, dtype=torch.int8)
    way(kernel, pack(values, 4).view(torch.int8), b)
    assert torch.equal(b.long(), values)


def test_a_single_element_leaves_its_neighbour(way):
    @T.prim_func
    def kernel(A: T.Tensor((16,), "int4")):
        with T.Kernel(1, threads=32):
            for i in T.serial(8):
                A[2 * i + 1] = A[2 * i] + 1
            A[0] = -2

    values = torch.randint(-8, 8, (16,))
    a = pack(values, 4).view(torch.int8)
    way(kernel, a)
    values[1::2] = values[0::2] + 1
    values[0] = -2
    assert torch.equal(unpack(a, 4, True), unpack(pack(values, 4), 4, True))


@pytest.mark.parametrize(("dtype", "how"), list(itertools.product(FLOATS, ["cast", "store", "const"])), ids=str)
def test_named_values_and_literals(dtype, how, way):
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            part = T.alloc_local((1,), dtype)
            for i in T.Parallel(32):
                if how == "cast":
                    x = T.cast(A[i], dtype)
                    B[i] = x
                elif how == "store":
                    part[0] = A[i]
                    B[i] = part[0]
                else:
                    B[i] = T.cast(2.7, dtype) + T.cast(0, "float32")

    a, b = torch.randn(32) * 2, torch.zeros(32)
    way(kernel, a, b)
    wanted = [rounded(2.7 if how == "const" else x, dtype) for x in a.tolist()]
    assert torch.equal(b, torch.tensor(wanted))


def test_extremes():
    assert T.max_value("float8_e4m3fnuz").value == 240 and T.min_value("float4_e2m1fn").value == -6
    assert T.max_value("int4").value == 7 and T.min_value("uint2").value == 0
    with pytest.raises(TileError, match="rounded to nearest"):
        T.cast(T.dynamic("n"), "float4_e2m1fn", round="rz")


def stores_side_by_side(A):
    for i in T.Parallel(8):
        A[2 * i] = 1


def stores_into_what_a_loop_shares(A):
    for i, j in T.Parallel(8, 2):
        A[i + 8 * j] = 1


def sums(A):
    tile, total = T.alloc_fragment((16,), "int4"), T.alloc_fragment((1,), "int4")
    T.copy(A, tile)
    T.reduce_sum(tile, total)


@pytest.mark.parametrize("body", [stores_side_by_side, stores_into_what_a_loop_shares, sums])
def test_what_narrow_types_cannot(body):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((16,), "int4")):
            with T.Kernel(1, threads=32):
                body(A)

    assert caught.value.code == "narrow_type"


def test_arguments_of_other_types_are_refused():
    @T.prim_func
    def kernel(A: T.Tensor((16,), "int4")):
        with T.Kernel(1, threads=32):
            A[0] = 1

    compiled = torch_tile.compile(kernel, target="cpu")
    compiled(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(LaunchError, match="int8"):
        compiled(torch.zeros(8, dtype=torch.int16))
    with pytest.raises(LaunchError, match="size"):
        compiled(torch.zeros(16, dtype=torch.int8))


@pytest.mark.parametrize("loop", ["vectorized", "serial", "unroll"])
def test_neighbours_by_a_loop_inside_a_nest(loop, way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float4_e2m1fn")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(16):
                first = i * 4
                for k in getattr(T, loop)(4):
                    B[first + k] = T.cast(A[first + k], "float4_e2m1fn")

    a, b = torch.randn(64) * 3, bytes_of(T.float4_e2m1fn, 64)
    way(kernel, a, b)
    assert torch.equal(
        torch.tensor(FP4)[unpack(b, 4, False)], torch.tensor([rounded(x, T.float4_e2m1fn) for x in a.tolist()])
    )


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_threads_write_whole_bytes(target):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int4")):
        with T.Kernel(1, threads=16):
            tx = T.get_thread_binding()
            first = tx * 4
            for k in T.vectorized(4):
                B[first + k] = T.cast(A[first + k], "int4")

    a, b = torch.randint(-8, 8, (64,), dtype=torch.int32), bytes_of(T.int4, 64)
    assert not torch_tile.compile(kernel, target=target).interpret(a, b)
    assert torch.equal(unpack(b, 4, True), a)


def test_threads_share_no_byte():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((64,), "int4")):
            with T.Kernel(1, threads=64):
                at = T.get_thread_binding() % 64
                A[at] = 1

    assert caught.value.code == "narrow_type"


def test_addresses_of_tiles_are_refused():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((64,), "int4")):
            with T.Kernel(1, threads=64):
                tile = T.alloc_shared((64,), "int4")
                T.copy(A, tile)
                T.call_extern("handle", "f", T.address_of(tile[0]))

    assert caught.value.code == "narrow_type"


def single_elements(store, blocks):
    """A kernel in whose blocks `store(O, R, I, bx)` sets single elements of packed tensors."""

    @T.prim_func
    def kernel(O: T.Tensor((64,), "uint2"), R: T.Tensor((8, 8), "int4"), I: T.Tensor((8,), "int32")):
        with T.Kernel(blocks, threads=32) as bx:
            store(O, R, I, bx)

    return kernel


@T.macro
def set_element(O, R, I, bx):
    O[bx] = 1


@T.macro
def set_every_other(O, R, I, bx):
    O[bx * 2] = 1


@T.macro
def copy_element(O, R, I, bx):
    s = T.alloc_shared((1,), "uint2")
    T.fill(s, 1)
    T.copy(s, O[bx : bx + 1])


@T.macro
def fill_element(O, R, I, bx):
    T.fill(O[bx : bx + 1], 1)


@T.macro
def set_by_turns(O, R, I, bx):
    for t in T.serial(bx, 8, 3):
        O[t] = 1


@T.macro
def set_named(O, R, I, bx):
    a = bx + 1
    b = a * 3
    O[b] = 1


@T.macro
def set_where_data_say(O, R, I, bx):
    O[I[bx]] = 1


@pytest.mark.parametrize(
    "store",
    [set_element, set_every_other, copy_element, fill_element, set_by_turns, set_named, set_where_data_say],
    ids=lambda f: f.__name__,
)
@pytest.mark.filterwarnings("ignore:.*(unwritten_part|unused_parameter|no_blocks)")
def test_blocks_that_would_share_a_byte_are_refused(store):
    """Each would read the byte, change its own element, and write the other block's back."""
    with pytest.raises(TileError, match="by blocks side by side") as caught:
        single_elements(store, 3)
    assert caught.value.code == "narrow_type" and "4 neighbours" in caught.value.diagnostics[0].fix
    single_elements(store, 1)  # alone, a block shares no byte


@T.macro
def set_in_bytes_of_its_own(O, R, I, bx):
    O[bx * 4 + 1] = 1
    for t in T.serial(3):
        O[bx * 4 + 12 + t] = t
    for t in T.serial(bx * 4 + 24, bx * 4 + 28):
        O[t] = 3
    R[bx, 3] = 5
    R[bx, 4] = bx


def test_blocks_store_single_elements_of_bytes_of_their_own():
    kernel = torch_tile.compile(single_elements(set_in_bytes_of_its_own, 3), target="cpu")
    tensors = bytes_of(T.uint2, 64), bytes_of(T.int4, 8, 8), torch.zeros(8, dtype=torch.int32)
    kernel(*tensors)
    wanted = torch.zeros(64, dtype=torch.int64)
    rows = torch.zeros(8, 8, dtype=torch.int64)
    for bx in range(3):
        wanted[bx * 4 + 1] = 1
        wanted[bx * 4 + 12 : bx * 4 + 15] = torch.arange(3)
        wanted[bx * 4 + 24 : bx * 4 + 28] = 3
        rows[bx, 3], rows[bx, 4] = 5, bx
    assert torch.equal(unpack(tensors[0], 2, False).long(), wanted)
    assert torch.equal(unpack(tensors[1], 4, True).long(), rows)
