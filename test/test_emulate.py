# SPDX-License-Identifier: Apache-2.0
"""Printed CUDA text runs on the host, and what is taken out of it is found."""

import re

import pytest
import torch
from emulate import EmulationError, emulate

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError


@T.prim_func
def product(A: T.Tensor((128, 192), "float16"), B: T.Tensor((192, 128), "float16"), C: T.Tensor((128, 128), "float16")):
    with T.Kernel(1, 2, threads=128) as (bx, by):
        a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 128), "float16")
        c, out = T.alloc_fragment((64, 128), "float32"), T.alloc_shared((64, 128), "float16")
        T.clear(c)
        for k in T.Pipelined(3, num_stages=2):
            T.copy(A[by * 64, k * 64], a)
            T.copy(B[k * 64, bx * 128], b)
            T.gemm(a, b, c)
        T.copy(c, out)
        T.copy(out, C[by * 64, bx * 128])


@T.prim_func
def reversed_rows(A: T.Tensor((8, 64), "float32"), B: T.Tensor((8, 64), "float32")):
    with T.Kernel(1, threads=64):
        tile = T.alloc_shared((8, 64), "float32")
        T.copy(A, tile)
        for i, j in T.Parallel(8, 64):
            B[i, j] = tile[7 - i, 63 - j]


def changed(program, target, pattern, text):
    """A kernel with a part of its text replaced."""
    kernel = torch_tile.compile(program, target=target)
    source = kernel.launcher.source
    replaced = re.sub(pattern, text, source.text)
    assert replaced != source.text
    kernel.launcher.source = source._replace(text=replaced)
    return kernel


def multiplied(kernel, seed, pauses=16):
    """The largest error of a product, infinite where the result is no number."""
    a, b = torch.randn(128, 192).half(), torch.randn(192, 128).half()
    out = torch.full((128, 128), float("nan")).half()
    emulate(kernel, a, b, out, seed=seed, pauses=pauses)
    return (out.double() - a.double() @ b.double()).abs().nan_to_num(float("inf")).max().item()


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "cuda:sm_120a"])
def test_products_are_right_in_every_order_of_threads(target):
    kernel = torch_tile.compile(product, target=target)
    assert ("wgmma" in kernel.get_kernel_source()) == (target == "cuda:sm_90a")
    for seed in range(4):
        assert multiplied(kernel, seed, pauses=64 * seed) < 0.1


# What is taken out, and of which text. Each is a fault that a GPU may show rarely.
REMOVED = {
    "a wait for copies": ("cuda:sm_80", r"tile::cp_async_wait<\d+>\(\);"),
    "barriers": ("cuda:sm_80", r"tile::barrier\(\);"),
    "a wait for full stages": ("cuda:sm_90a", r"tile::mbarrier_wait\(\w*full[^;]*;"),
    "a wait for products": ("cuda:sm_90a", r"tile::wgmma_wait<\d+>\(\);"),
    "barriers before the store": ("cuda:sm_90a", r"tile::(named_)?barrier(<[^>]*>)?\(\);(?=[^}]*tma_store)"),
    "a commit of products": ("cuda:sm_90a", r"tile::wgmma_commit\(\);"),
    "arrivals": ("cuda:sm_90a", r"tile::mbarrier_arrive\(\w*empty[^;]*;"),
    "expected bytes": ("cuda:sm_90a", r"tile::mbarrier_expect\([^;]*;"),
}


@pytest.mark.parametrize("what", REMOVED)
def test_what_is_taken_out_is_found(what):
    target, pattern = REMOVED[what]
    kernel = changed(product, target, pattern, "")

    def found(seed):
        try:
            return not multiplied(kernel, seed, pauses=64) < 0.1
        except EmulationError:
            return True

    assert any(map(found, range(12)))


@pytest.mark.parametrize(
    ("pattern", "text", "problem"),
    [
        (r"(B \+ )", r"\g<1>512 + ", "outside of every tensor"),
        (r"(B \+ )", r"\g<1>-4 + ", "outside of every tensor"),
        (r"(A \+ )", r"\g<1>1 + ", "not aligned"),
        (r"tile::barrier\(\);", "if (thread < 32) tile::named_barrier<1, 64>();", "wait for each other for ever"),
    ],
)
def test_faults_are_reported(pattern, text, problem):
    kernel = changed(reversed_rows, "cuda:sm_80", pattern, text)
    with pytest.raises(EmulationError, match=problem):
        emulate(kernel, torch.randn(8, 64), torch.empty(8, 64))


def test_results_are_allocated_and_returned():
    @torch_tile.jit(out_idx=[1], target="cuda:sm_80")
    def doubled(n):
        @T.prim_func
        def kernel(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "int32")):
            with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
                for i in T.Parallel(32):
                    B[bx * 32 + i] = A[bx * 32 + i] * 2

        return kernel

    a = torch.arange(70, dtype=torch.int32)
    assert torch.equal(emulate(doubled(70), a), a * 2)


def test_only_cuda_kernels_have_such_text():
    with pytest.raises(LaunchError, match="no CUDA text"):
        emulate(torch_tile.compile(reversed_rows, target="cpu"), torch.randn(8, 64), torch.empty(8, 64))


def in_pairs(dtype, n):
    """A kernel whose operations on 16-bit floats take neighbours together: in place, by one for both, behind casts."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, n), dtype), S: T.Tensor((64, n // 8), dtype), C: T.Tensor((64, n), dtype),
        F: T.Tensor((64, n), "float32"), O: T.Tensor((64, n), dtype), P: T.Tensor((64, n), dtype),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            a, c, o = (T.alloc_fragment((64, n), dtype) for _ in range(3))
            f, s = T.alloc_fragment((64, n), "float32"), T.alloc_shared((64, n // 8), dtype)
            for tensor, tile in ((A, a), (C, c), (F, f), (S, s)):
                T.copy(tensor, tile)
            for i, j in T.Parallel(64, n):
                o[i, j] = a[i, j] * s[i, j // 8] + c[i, j]
            for i, j in T.Parallel(64, n):
                a[i, j] = a[i, j] * (T.cast(f[i, j], dtype) - 1.5)
            T.copy(o, O)
            T.copy(a, P)

    return kernel


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pairs_have_the_bits_of_single_operations(dtype, target, seed):
    n, kind = 64, getattr(torch, dtype)
    kernel = torch_tile.compile(in_pairs(dtype, n), target=target)
    text = kernel.get_kernel_source()
    assert all(f"pair_{name}<" in text for name in ("product", "sum", "difference", "narrowed"))
    special = torch.tensor([0x0000, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7BFF, 0x7C00, 0x3F80])
    a, s, c = (
        torch.where(
            torch.rand(64, width) < 0.3, special[torch.randint(12, (64, width))], torch.randint(1 << 16, (64, width))
        )
        .to(torch.int16)
        .view(kind)
        for width in (n, n // 8, n)
    )
    f = a.float().roll(1) * 1.001
    found = [torch.zeros(64, n, dtype=kind) for _ in range(6)]
    emulate(kernel, a, s, c, f, *found[:2])
    kernel.interpret(a, s, c, f, *found[2:4])
    torch_tile.compile(in_pairs(dtype, n), target="cpu")(a, s, c, f, *found[4:])
    for out in (found[2:4], found[4:]):
        for x, y in zip(found[:2], out, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(x.signbit() | x.isnan(), y.signbit() | y.isnan())
    assert found[0].isfinite().any() and found[0].isnan().any()
