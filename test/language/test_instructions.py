# SPDX-License-Identifier: Apache-2.0
"""Instructions by TIR's names: copies in flight, matrices of a warp."""

import pytest
import torch
from emulate import emulate

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

TARGETS = ["cuda:sm_80", "cuda:sm_90a"]


def on_threads(kernel, target, *args):
    made = tilelang.compile(kernel, target=target)
    findings = made.interpret(*args)
    assert not findings, findings.report()
    assert not made.cubin.warnings
    return made


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype, count", [("float16", 8), ("float32", 1), ("uint8", 8)])
def test_copies_in_flight(dtype, count, target, seed):
    """Two groups of copies, where a predicate holds; else zeros."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 64 * count), dtype), B: T.Tensor((2, 64 * count), dtype)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding(0)
            tile = T.alloc_shared((2, 64 * count), dtype)
            to, source = T.access_ptr(tile[0, tx * count], "w", count), T.access_ptr(A[0, tx * count], "r", count)
            T.ptx_cp_async(to, source, count)
            T.ptx_commit_group()
            T.ptx_cp_async(tile[1, tx * count], T.address_of(A[1, tx * count]), count, predicate=tx % 2 == 0)
            T.ptx_commit_group()
            T.ptx_wait_group(1)
            for k in T.serial(count):
                B[0, tx * count + k] = tile[0, tx * count + k]
            T.ptx_wait_group(0)
            for k in T.serial(count):
                B[1, tx * count + k] = tile[1, tx * count + k]

    kind = getattr(torch, dtype)
    a, b = torch.randint(0, 100, (2, 64 * count)).to(kind), torch.zeros(2, 64 * count, dtype=kind)
    made = on_threads(kernel, target, a, b)
    wanted = a.clone().reshape(2, 64, count)
    wanted[1, 1::2] = 0
    assert torch.equal(b, wanted.reshape(2, -1)) and "cp_async" in made.get_kernel_source()
    if target == "cuda:sm_80":
        b.zero_()
        emulate(made, a, b)
        assert torch.equal(b, wanted.reshape(2, -1))


@pytest.mark.parametrize("target", TARGETS)
def test_a_product_of_a_warp(target, seed):
    """m16n8k16 by hand: B lies row by row along k, and is transposed as it is loaded."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float16"), B: T.Tensor((16, 8), "float16"), C: T.Tensor((16, 8), "float32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding(0)
            a, b = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 8), "float16")
            x, y = T.alloc_local((8,), "float16"), T.alloc_local((4,), "float16")
            z = T.alloc_local((4,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.mma_fill("float32", 4, z.data, 0)
            source = T.access_ptr(a[tx % 16, tx // 16 * 8], "r", extent=8)
            T.ptx_ldmatrix(T.bool(False), 4, source, T.access_ptr(x[0], "w", extent=8))
            T.ptx_ldmatrix(T.bool(True), 2, T.access_ptr(b[tx % 16, 0], "r", extent=8), T.access_ptr(y[0], "w", 4))
            types = "fp16", "fp16", "fp32"
            T.ptx_mma("float32", "m16n8k16", "row", "col", *types, x.data, 0, y.data, 0, z.data, 0, T.bool(False))
            for n in T.serial(4):
                C[tx // 4 + n // 2 * 8, tx % 4 * 2 + n % 2] = z[n]

    a, b = torch.randint(-4, 5, (16, 16)).half(), torch.randint(-4, 5, (16, 8)).half()
    c = torch.zeros(16, 8)
    on_threads(kernel, target, a, b, c)
    assert torch.equal(c, a.float() @ b.float())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda A, s, x: T.ptx_cp_async(A[0], s[0], 4), lambda A, s, x: T.ptx_cp_async(s[0], A[0], 3),
        lambda A, s, x: T.ptx_cp_async(3, A[0], 4), lambda A, s, x: T.ptx_ldmatrix(False, 4, A[0], x[0]),
        lambda A, s, x: T.ptx_ldmatrix(False, 3, s[0], x[0]), lambda A, s, x: T.ptx_ldmatrix(True, 1, s[0], x[0]),
        lambda A, s, x: T.ptx_mma("float32", "m8n8k4", "row", "col", "fp16", "fp16", "fp32", x, 0, x, 0, x, 0),
        lambda A, s, x: T.ptx_mma("float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", x, 0, x, 0, x, 0),
        lambda A, s, x: T.ptx_mma("float32", "m16n8k8", "row", "col", "tf32", "tf32", "fp32", s, 0, x, 0, x, 0),
    ],
)  # fmt: skip
def test_what_is_refused(wrong):
    with pytest.raises(TileError, match="fix:"):

        @T.prim_func
        def kernel(A: T.Tensor((16,), "float32")):
            with T.Kernel(1, threads=32):
                wrong(A, T.alloc_shared((16,), "float32"), T.alloc_local((16,), "float32"))


@pytest.mark.parametrize(("option", "value"), [("saturate", True), ("operator", "xor")])
def test_options_of_products_are_not_dropped(option, value):
    with pytest.raises(TileError, match=f"argument `{option}`"):

        @T.prim_func
        def kernel(A: T.Tensor((16,), "float16")):
            with T.Kernel(1, threads=32):
                x, c = T.alloc_local((8,), "float16"), T.alloc_local((4,), "float32")
                types = "row", "col", "fp16", "fp16", "fp32"
                T.ptx_mma("float32", "m16n8k16", *types, x.data, 0, x.data, 0, c.data, 0, **{option: value})
