# SPDX-License-Identifier: Apache-2.0
"""Products of warps by hand: every type and order of operands, thread by thread and as printed text."""

import itertools

import pytest
import torch
from emulate import emulate

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.cuda.intrinsics import (
    TensorCoreIntrinEmitter,
    WGMMATensorCoreIntrinEmitter,
    get_swizzle_layout,
    make_mma_swizzle_layout,
)
from torch_tile.diagnostics.errors import TileError


def product(in_dtype, out_dtype, a_across, b_across, tiles=(32, 16), is_m_first=False, chunk=32, M=64, N=64, K=64):
    """A block of 2 * 2 warps multiplies A (M, K), or (K, M) if `a_across`, by B (K, N), or (N, K) if not `b_across`."""
    emitter = TensorCoreIntrinEmitter(
        in_dtype, in_dtype, out_dtype, a_across, not b_across, 2, 2, *tiles, chunk, is_m_first=is_m_first
    )
    bm, bn = 2 * tiles[0], 2 * tiles[1]
    a_tile, b_tile = (chunk, bm) if a_across else (bm, chunk), (chunk, bn) if b_across else (bn, chunk)

    @T.prim_func
    def main(
        A: T.Tensor((K, M) if a_across else (M, K), in_dtype),
        B: T.Tensor((K, N) if b_across else (N, K), in_dtype),
        C: T.Tensor((M, N), out_dtype),
    ):
        with T.Kernel(N // bn, M // bm, threads=emitter.threads) as (bx, by):
            a, b = T.alloc_shared(a_tile, in_dtype), T.alloc_shared(b_tile, in_dtype)
            c = T.alloc_shared((bm, bn), out_dtype)
            a_local = T.alloc_local((emitter.warp_rows * emitter.local_size_a,), in_dtype)
            b_local = T.alloc_local((emitter.warp_cols * emitter.local_size_b,), in_dtype)
            c_local = T.alloc_local((emitter.warp_rows * emitter.warp_cols * emitter.local_size_out,), out_dtype)
            T.annotate_layout({a: make_mma_swizzle_layout(a), b: make_mma_swizzle_layout(b)})
            T.clear(c_local)
            for k in T.Pipelined(K // chunk, num_stages=2):
                T.copy(A[k * chunk, by * bm] if a_across else A[by * bm, k * chunk], a)
                T.copy(B[k * chunk, bx * bn] if b_across else B[bx * bn, k * chunk], b)
                for inner in T.serial(chunk // emitter.micro_size_k):
                    emitter.ldmatrix_a(a_local, a, inner)
                    emitter.ldmatrix_b(b_local, b, inner)
                    emitter.mma(a_local, b_local, c_local)
            emitter.stmatrix(c_local, c)
            T.copy(c, C[by * bm, bx * bn])

    return main


def operands(dtype, a_across, b_across, M=64, N=64, K=64):
    kind = getattr(torch, dtype)
    low = 0 if dtype == "uint8" else -4
    a, b = torch.randint(low, 5, (M, K)), torch.randint(low, 5, (K, N))
    wanted = a.double() @ b.double()
    given = (a.mT if a_across else a).to(kind).contiguous(), (b if b_across else b.mT).to(kind).contiguous()
    return *given, wanted


TYPES = [
    ("float16", "float16"), ("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("int8", "int32"),
    ("uint8", "int32"), ("float64", "float64"),
]  # fmt: skip


@pytest.mark.parametrize("a_across, b_across", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("dtypes", TYPES, ids="-".join)
def test_products(dtypes, a_across, b_across, seed):
    made = tilelang.compile(product(*dtypes, a_across, b_across), target="cuda:sm_80")
    a, b, wanted = operands(dtypes[0], a_across, b_across)
    c = torch.zeros(64, 64, dtype=getattr(torch, dtypes[1]))
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert torch.equal(c.double(), wanted)
    assert "mma_m" in made.get_kernel_source() and not made.cubin.warnings


@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("tiles", [(16, 8), (16, 24), (32, 32)])
def test_tiles_of_warps(tiles, dtype, seed):
    out = "int32" if dtype == "int8" else "float32"
    kernel = product(dtype, out, False, False, tiles, is_m_first=tiles == (16, 24), M=2 * tiles[0], N=2 * tiles[1])
    made = tilelang.compile(kernel, target="cuda:sm_90a")
    a, b, wanted = operands(dtype, False, False, 2 * tiles[0], 2 * tiles[1])
    c = torch.zeros(wanted.shape, dtype=getattr(torch, out))
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert torch.equal(c.double(), wanted)


def test_printed_text(seed):
    made = tilelang.compile(product("float16", "float32", True, True), target="cuda:sm_80")
    a, b, wanted = operands("float16", True, True)
    c = torch.zeros(64, 64)
    emulate(made, a, b, c)
    assert torch.equal(c.double(), wanted)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_a_listing_with_pieces_of_shared_memory(target, seed):
    """Loads by T.Parallel, layouts from get_swizzle_layout, sums in pieces of 16 by 16, warps bound by name."""
    M = N = K = 64
    block_row_warps = block_col_warps = 2
    warp_row_tiles = warp_col_tiles = chunk = 32
    micro, warp_size = 16, 32
    block_M, block_N, block_K = block_row_warps * warp_row_tiles, block_col_warps * warp_col_tiles, chunk
    threads, size = warp_size * block_row_warps * block_col_warps, micro * micro // warp_size
    warp_rows, warp_cols = warp_row_tiles // micro, warp_col_tiles // micro
    mma_emitter = TensorCoreIntrinEmitter(
        a_dtype="float16", b_dtype="float16", accum_dtype="float16", a_transposed=False, b_transposed=True,
        block_row_warps=block_row_warps, block_col_warps=block_col_warps, warp_row_tiles=warp_row_tiles,
        warp_col_tiles=warp_col_tiles, chunk=chunk,
    )  # fmt: skip

    def make_swizzle_layout(shared_buf):
        dtype, shape = shared_buf.dtype, shared_buf.shape
        return T.Layout(shape, lambda i, j: get_swizzle_layout(i, j, shape[-1], dtype))

    @T.prim_func
    def main(A: T.Buffer((M, K), "float16"), B: T.Buffer((N, K), "float16"), C: T.Buffer((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float16", scope="shared.dyn")
            B_shared = T.alloc_shared((block_N, block_K), "float16", scope="shared.dyn")
            C_shared = T.alloc_shared((block_M // micro, block_N // micro, micro, micro), "float16")
            A_local = T.alloc_local((warp_rows * size), "float16")
            B_local = T.alloc_local((warp_cols * size), "float16")
            C_local = T.alloc_local((warp_rows * warp_cols * size), "float16")
            T.thread_binding(0, threads, "threadIdx.x")
            T.annotate_layout({A_shared: make_swizzle_layout(A_shared), B_shared: make_swizzle_layout(B_shared)})
            T.use_swizzle(panel_size=10)
            T.clear(C_local)
            for ko in T.Pipelined((K // block_K), num_stages=2):
                for i, k in T.Parallel(block_M, block_K):
                    A_shared[i, k] = A[by * block_M + i, ko * block_K + k]
                for j, k in T.Parallel(block_N, block_K):
                    B_shared[j, k] = B[bx * block_N + j, ko * block_K + k]
                for ki in T.serial(0, (block_K // micro)):
                    mma_emitter.ldmatrix_a(A_local, A_shared, ki)
                    mma_emitter.ldmatrix_b(B_local, B_shared, ki)
                    mma_emitter.mma(A_local, B_local, C_local)
            mma_emitter.stmatrix(C_local, C_shared)
            for i, j in T.Parallel(block_M, block_N):
                C[by * block_M + i, bx * block_N + j] = C_shared[i // micro, j // micro, i % micro, j % micro]

    made = tilelang.compile(main, target=target)
    a, b, wanted = operands("float16", False, False)
    c = torch.zeros(64, 64).half()
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert torch.equal(c.double(), wanted) and "ldmatrix" in made.get_kernel_source()


def test_sums_go_to_global_memory(seed):
    emitter = TensorCoreIntrinEmitter("float16", "float16", "float32", False, True, 2, 1, 16, 16, 16)

    @T.prim_func
    def main(A: T.Tensor((32, 16), "float16"), B: T.Tensor((48, 16), "float16"), C: T.Tensor((32, 48), "float32")):
        with T.Kernel(3, threads=64) as bx:
            a, b = T.alloc_shared((2, 32, 16), "float16"), T.alloc_shared((16, 16), "float16")
            a_local, b_local = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
            c_local = T.alloc_local((8,), "float32")
            T.copy(A, a[1, :, :])
            T.copy(B[bx * 16, 0], b)
            T.clear(c_local)
            emitter.ldmatrix_a(a_local, a[1, :, :], 0)
            emitter.ldmatrix_b(b_local, b, 0)
            emitter.mma(a_local, b_local, c_local)
            emitter.stmatrix(c_local, C, 0, bx)

    a, b, wanted = operands("float16", False, False, 32, 48, 16)
    c = torch.zeros(32, 48)
    findings = tilelang.compile(main, target="cuda:sm_80").interpret(a, b, c)
    assert not findings, findings.report()
    assert torch.equal(c.double(), wanted)


def test_products_of_warpgroups(seed):
    emitter = WGMMATensorCoreIntrinEmitter("float16", "float16", "float32", False, True, 4, 1, 16, 64, 64)

    @T.prim_func
    def main(A: T.Tensor((64, 128), "float16"), B: T.Tensor((64, 128), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({c: emitter.make_mma_store_layout(c)})
            for k in T.serial(2):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                emitter.wgmma(a, b, c, clear_accum=k == 0)
            T.copy(c, C)

    made = tilelang.compile(main, target="cuda:sm_90a")
    a, b, wanted = operands("float16", False, False, K=128)
    c = torch.zeros(64, 64)
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert torch.equal(c.double(), wanted) and "wgmma" in made.get_kernel_source()


@pytest.mark.parametrize(
    "given", [{"a_dtype": "int64"}, {"accum_dtype": "int32"}, {"warp_row_tiles": 8}, {"num_elems_per_byte": 2}]
)
def test_what_is_refused(given):
    with pytest.raises(TileError, match="TensorCoreIntrinEmitter"):
        TensorCoreIntrinEmitter(**{"warp_row_tiles": 16, **given})


def test_operands_lie_where_instructions_want_them():
    emitter = TensorCoreIntrinEmitter(warp_row_tiles=16, warp_col_tiles=16)
    loads, products = lambda a, b: emitter.ldmatrix_a(a, b, 0), lambda a, b: emitter.mma(b, b, b)
    for wrong, text in ((loads, "alloc_shared"), (products, "alloc_local")):
        with pytest.raises(TileError, match=text):

            @T.prim_func
            def main(C: T.Tensor((4,), "float32")):
                with T.Kernel(1, threads=128):
                    a = T.alloc_local((8,), "float16")
                    b = T.alloc_fragment((16, 16), "float16")
                    wrong(a, b)  # noqa: B023


@pytest.mark.parametrize("a_across, b_across", [(False, False), (True, True)])
def test_addresses_for_loads_by_hand(a_across, b_across, seed):
    """What the emitter does for one piece, written out with T.ptx_ldmatrix and T.ptx_mma."""

    @T.prim_func
    def main(A: T.Tensor((16, 16), "float16"), B: T.Tensor((16, 16), "float16"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            a, b = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 16), "float16")
            x, y = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
            z = T.alloc_local((8,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(z)
            i, k = T.get_ldmatrix_offset("A", lane, 0, 16, "float16", a_across)
            T.ptx_ldmatrix(a_across, 4, T.access_ptr(a[i, k], "r", extent=8), T.access_ptr(x[0], "w", extent=8))
            i, k = T.get_ldmatrix_offset("B", lane, 0, 16, "float16", not b_across)
            T.ptx_ldmatrix(b_across, 4, T.access_ptr(b[i, k], "r", extent=8), T.access_ptr(y[0], "w", extent=8))
            types = "fp16", "fp16", "fp32"
            for half in T.unroll(2):
                T.ptx_mma("float32", "m16n8k16", "row", "col", *types, x.data, 0, y.data, half * 4, z.data, half * 4)
            for n in T.unroll(8):
                row, column = T.mma_store_index_map(lane, n)
                C[row, column] = z[n]

    a, b, wanted = operands("float16", a_across, b_across, 16, 16, 16)
    c = torch.zeros(16, 16)
    findings = tilelang.compile(main, target="cuda:sm_80").interpret(a, b, c)
    assert not findings, findings.report()
    assert torch.equal(c.double(), wanted)


def test_modules_of_tilelang():
    from torch_tile.cuda.intrinsics.macro import mma_macro_generator, wgmma_macro_generator

    assert mma_macro_generator.TensorCoreIntrinEmitter is TensorCoreIntrinEmitter
    assert wgmma_macro_generator.TensorCoreIntrinEmitter is WGMMATensorCoreIntrinEmitter
    with pytest.raises(TileError, match="element by element"):
        T.get_ldmatrix_offset("A", 3, 0, 16, "int8", True)
