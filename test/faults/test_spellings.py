# SPDX-License-Identifier: Apache-2.0
"""TileLang's spellings of operations and keywords, each compared with what torch or Python gives."""

import math

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

TARGETS = ["cuda:sm_80", "cuda:sm_90a"]


def on_threads(kernel, target, *args):
    made = torch_tile.compile(kernel, target=target)
    findings = made.interpret(*args)
    assert not findings, findings.report()
    assert made.cubin.data[:4] == b"\x7fELF" and not made.cubin.warnings


@pytest.mark.parametrize("stages", [0, 2])
def test_products_cleared_where_the_device_says_so(way, stages):
    """Every second product starts anew."""
    M, N, K, S = 64, 64, 32, 5

    @T.prim_func
    def kernel(A: T.Tensor((S, M, K), "float16"), B: T.Tensor((S, K, N), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((M, K), "float16"), T.alloc_shared((K, N), "float16")
            c = T.alloc_fragment((M, N), "float32")
            for k in T.Pipelined(S, num_stages=stages):
                T.copy(A[k, 0, 0], a)
                T.copy(B[k, 0, 0], b)
                T.gemm(a, b, c, clear_accum=(k % 3 == 0))
            T.copy(c, C)

    a, b = torch.randn(S, M, K).half(), torch.randn(S, K, N).half()
    c = torch.full((M, N), torch.nan)
    way(kernel, a, b, c)
    want = sum(a[k].double() @ b[k].double() for k in (3, 4))
    torch.testing.assert_close(c.double(), want, rtol=1e-3, atol=1e-2)


def test_conditions_that_python_knows_stay_options():
    @T.prim_func
    def kernel(C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1) as _:
            a, c = T.alloc_shared((16, 16), "float16"), T.alloc_fragment((16, 16), "float32")
            for j in range(1):
                T.gemm(a, a, c, clear_accum=True)
                T.gemm(a, a, c, clear_accum=T.bool(1 == 2))
                T.gemm(a, a, c, clear_accum=j == 0)

    text = repr(kernel)
    assert text.count("clear_accum=True") == 1 and text.count("T.gemm(") == 3 and "if " in text


def test_keywords():
    """As authors of TileLang write them."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            bars = T.alloc_barrier(64)
            T.mbarrier_arrive(mbarrier=bars[0])
            T.mbarrier_wait_parity(mbarrier=bars[0], parity=0)
            T.barrier_arrive(barrier_id=bars[0])
            T.barrier_wait(barrier_id=bars[0], parity=1)
            tx = T.get_thread_binding(dim=0)
            B[tx] = T.clamp(A[tx], min_val=-1.0, max_val=1.0)
            T.device_assert(T.get_warp_idx(32) * 32 + T.get_lane_idx(warp_size=32) == tx)
            T.device_assert(T.get_warp_group_idx(32, 4) == 0 and T.get_warp_idx_sync(16) == tx // 16)

    a, b = torch.randn(64) * 2, torch.zeros(64)
    on_threads(kernel, "cuda:sm_90a", a, b)
    assert torch.equal(b, a.clamp(-1, 1))


@pytest.mark.parametrize("names", ["M, N", "M N", "M,N", " M  N "])
def test_names_of_dimensions(names):
    @torch_tile.jit(target="cpu")
    def doubled(A, names):
        M, N = T.const(names)
        A: T.Tensor((M, N), "float32")
        B = T.empty((M, N), "float32")
        with T.Kernel(M) as b:
            for j in T.Parallel(N):
                B[b, j] = A[b, j] * 2.0
        return B

    a = torch.randn(3, 5)
    assert torch.equal(doubled(a, names), a * 2)
    m, n = T.dynamic(names)
    assert (m.name, n.name) == ("M", "N")
    for empty in ("", " , ", None):
        with pytest.raises(TileError, match='write "m" or'):
            T.dynamic(empty)


def test_any_and_all_of_a_threads_own(way):
    @T.prim_func
    def kernel(A: T.Tensor((16, 2, 3), "int32"), B: T.Tensor((16, 4), "int32")):
        with T.Kernel(16, threads=32) as b:
            own = T.alloc_local((2, 3), "int32")
            for i, j in T.grid(2, 3):
                own[i, j] = A[b, i, j]
            some, every = T.any_of(own), T.all_of(own)
            own[0, 0] = 1
            B[b, 0] = T.if_then_else(some, 1, 0)
            B[b, 1] = T.cast(every, "int32")
            B[b, 2] = T.cast(T.any_of(own[1, 0:2]), "int32")
            B[b, 3] = 0
            if T.all_of(own):
                B[b, 3] = 1

    a, b = torch.randint(0, 3, (16, 2, 3), dtype=torch.int32), torch.zeros(16, 4, dtype=torch.int32)
    a[0], a[1] = 0, 2
    way(kernel, a, b)
    set_, first = a != 0, a.clone()
    first[:, 0, 0] = 1
    want = [set_.flatten(1).any(1), set_.flatten(1).all(1), set_[:, 1, :2].any(1), (first != 0).flatten(1).all(1)]
    assert torch.equal(b, torch.stack(want, 1).int())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("threads", [(32,), (128,), (96,), (32, 4), (8, 4, 3), (48,)])
def test_votes_of_a_block(threads, target):
    count = math.prod(threads)

    @T.prim_func
    def kernel(A: T.Tensor((4, count), "int32"), B: T.Tensor((4, count, 3), "int32")):
        with T.Kernel(4, threads=threads) as b:
            at = T.thread_index()
            flag = A[b, at] != 0
            B[b, at, 0] = T.syncthreads_count(flag)
            B[b, at, 1] = T.syncthreads_or(A[b, at])
            B[b, at, 2] = T.syncthreads_and(flag)

    a = torch.randint(0, 2, (4, count), dtype=torch.int32) * 6
    a[0], a[1], a[2] = 0, 1, 0
    a[2, count - 1] = -1
    b = torch.full((4, count, 3), -1, dtype=torch.int32)
    on_threads(kernel, target, a, b)
    set_ = a != 0
    want = torch.stack([set_.sum(1), set_.any(1), set_.all(1)], 1).int()
    assert torch.equal(b, want[:, None].expand(4, count, 3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["int32", "float32", "float16", "int64", "uint8", "float64"])
def test_lanes_of_one_value(dtype, target):
    @T.prim_func
    def kernel(A: T.Tensor((64,), dtype), B: T.Tensor((64, 2), "uint32")):
        with T.Kernel(1, threads=64) as _:
            tx = T.get_thread_binding()
            B[tx, 0] = T.match_any_sync(A[tx])
            B[tx, 1] = T.match_all_sync(A[tx])

    a = torch.randint(0, 5, (64,)).to(getattr(torch, dtype))
    a[32:] = 3
    b = torch.zeros(64, 2, dtype=torch.int64).to(torch.uint32)
    on_threads(kernel, target, a, b)
    for lane in range(64):
        warp = a[lane // 32 * 32 :][:32]
        assert b[lane, 0].item() == sum(1 << n for n in range(32) if warp[n] == a[lane])
        assert b[lane, 1].item() == (0xFFFFFFFF if lane >= 32 else 0)


def test_scalar_functions(way):
    @T.prim_func
    def kernel(X: T.Tensor((128,), "float32"), N: T.Tensor((128,), "int32"), Y: T.Tensor((2, 128), "float32"),
               P: T.Tensor((128,), "int32")):  # fmt: skip
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(128):
                Y[0, i] = T.exp10(X[i])
                Y[1, i] = T.fast_rcp(X[i])
                P[i] = getattr(T, "__ffs")(N[i])

    x = (torch.randn(128) * 9).clamp(-30, 30)  # whose powers of ten are normal numbers
    n = torch.randint(-(2**31), 2**31 - 1, (128,)).to(torch.int32) << torch.randint(0, 32, (128,), dtype=torch.int32)
    n[:4] = torch.tensor([0, 1, -(2**31), -1], dtype=torch.int32)
    y, p = torch.zeros(2, 128), torch.zeros(128, dtype=torch.int32)
    way(kernel, x, n, y, p)
    torch.testing.assert_close(y[0].double(), torch.pow(10.0, x.double()), rtol=1e-5, atol=0)
    torch.testing.assert_close(y[1], 1 / x, rtol=1e-6, atol=0)
    assert p.tolist() == [(v & -v).bit_length() if v else 0 for v in (m & 0xFFFFFFFF for m in n.tolist())]


def test_transposes_of_any_rank(way):
    @T.prim_func
    def kernel(A: T.Tensor((3, 2, 16, 24), "float16"), B: T.Tensor((3, 2, 24, 16), "float32")):
        with T.Kernel(3, threads=64) as b:
            tile, turned = T.alloc_shared((2, 16, 24), "float16"), T.alloc_shared((2, 24, 16), "float32")
            T.copy(A[b, 0, 0, 0], tile)
            T.transpose(tile, turned)
            T.transpose(A[b, 1, 0:16, :], turned[1, :, :])
            T.copy(turned, B[b, 0, 0, 0])

    a, b = torch.randn(3, 2, 16, 24).half(), torch.zeros(3, 2, 24, 16)
    way(kernel, a, b)
    assert torch.equal(b, a.mT.float())


def test_reductions_by_name(way):
    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float32"), B: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=32) as _:
            a, b = T.alloc_fragment((32, 32)), T.alloc_fragment((32,))
            T.copy(A, a)
            T.reduce(a, b, "max", dim=1, nan_propagate=True)
            T.copy(b, B[0, :])
            T.reduce(a, b, "absmax", dim=1, batch=1)
            T.copy(b, B[1, :])

    a, b = torch.randn(32, 32), torch.zeros(2, 32)
    a[3, 4] = torch.nan
    way(kernel, a, b)
    want = torch.stack([a.amax(1), a.nan_to_num(0.0).abs().amax(1)])
    torch.testing.assert_close(b, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "text"), [("maxx", "did you mean 'max'"), ("mean", "give one of|did you mean")])
def test_no_such_reduction(kind, text):
    with pytest.raises(TileError, match=text):

        @T.prim_func
        def kernel(A: T.Tensor((4, 4), "float32"), B: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                T.reduce(A, B, kind)


def test_branches_on_dtypes_go_one_way():
    """Whichever spelling a kernel is given."""

    def kernel_of(dtype):
        @T.prim_func
        def kernel(A: T.Tensor((4,), dtype)):
            with T.Kernel(1) as _:
                if A.dtype == "float16" and dtype in ("float16", "bfloat16") and T.dtype(dtype).startswith("float"):
                    A[0] = 1.0
                A[1] = T.max_value(A.dtype) if A.dtype == torch.float16 else 0.0

        return repr(kernel)

    assert "1.0" in kernel_of("float16") and kernel_of("float16") == kernel_of(T.float16)
    assert {T.float16: 1}["float16"] == 1 and getattr(torch, T.bfloat16) is torch.bfloat16
