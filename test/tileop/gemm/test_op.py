# SPDX-License-Identifier: Apache-2.0
import itertools
import random

import pytest
import torch

import torch_tile
import torch_tile.language as T

TYPES = [
    ("float32", "float32", 1e-5), ("float16", "float32", 1e-5), ("bfloat16", "float32", 1e-5),
    ("float64", "float64", 1e-12), ("float16", "float16", 2e-2), ("float8_e4m3fn", "float32", 1e-5),
    ("int8", "int32", 0), ("uint8", "int32", 0),
]  # fmt: skip


def operand(shape, dtype):
    dtype = getattr(torch, dtype)
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -20, 20, shape).to(dtype)


def product(M, N, K, dtype, accum, transpose_A, transpose_B, clear_accum):
    a_shape = (K, M) if transpose_A else (M, K)
    b_shape = (N, K) if transpose_B else (K, N)

    @T.prim_func
    def kernel(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((M, N), accum)):
        with T.Kernel(1) as _:
            a = T.alloc_shared(a_shape, dtype)
            b = T.alloc_shared(b_shape, dtype)
            c = T.alloc_fragment((M, N), accum)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(C, c)
            T.gemm(a, b, c, transpose_A=transpose_A, transpose_B=transpose_B, clear_accum=clear_accum)
            T.copy(c, C)

    return kernel


def wanted(a, b, c, transpose_A, transpose_B, clear_accum):
    a = a.T if transpose_A else a
    b = b.T if transpose_B else b
    total = a.double() @ b.double()
    return total if clear_accum else total + c.double()


CASES = [
    (types, flags)
    for types in TYPES
    for flags in itertools.product([False, True], repeat=3)
    if types[0] in ("float32", "float16") or flags in ((False, True, False), (True, False, True))
]


@pytest.mark.parametrize(("types", "flags"), CASES, ids=str)
def test_product(types, flags, launch, seed):
    dtype, accum, tolerance = types
    draw = random.Random(seed)
    M, N, K = (draw.randint(1, 40) for _ in range(3))
    transpose_A, transpose_B, _ = flags
    a = operand((K, M) if transpose_A else (M, K), dtype)
    b = operand((N, K) if transpose_B else (K, N), dtype)
    c = operand((M, N), accum)
    expected = wanted(a, b, c, *flags)
    launch(product(M, N, K, dtype, accum, *flags), a, b, c)
    scale = K**0.5 if tolerance else 1
    torch.testing.assert_close(c.double(), expected, rtol=tolerance, atol=tolerance * scale)


def test_slices_and_leading_ones(launch):
    @T.prim_func
    def kernel(A: T.Tensor((2, 8, 12), "float32"), B: T.Tensor((12, 20), "float32"), C: T.Tensor((8, 20), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((2, 8, 12), "float32")
            b = T.alloc_shared((12, 20), "float32")
            c = T.alloc_fragment((8, 20), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a[1, :, 4:8], b[4:8, 5:15], c[:, 10:20], policy=T.GemmWarpPolicy.FullRow)
            T.gemm(a[0:1, 2:5, :], b[:, 0:7], c[5:8, 0:7], policy=T.GemmWarpPolicy.FullCol, k_pack=1)
            T.copy(c, C)

    a, b, c = torch.randn(2, 8, 12), torch.randn(12, 20), torch.zeros(8, 20)
    launch(kernel, a, b, c)
    expected = torch.zeros(8, 20, dtype=torch.float64)
    expected[:, 10:20] = a[1, :, 4:8].double() @ b[4:8, 5:15].double()
    expected[5:8, 0:7] = a[0, 2:5].double() @ b[:, 0:7].double()
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-5)


def test_mixed_operands(launch):
    """Probabilities in float32 against values in float16, as attention kernels write it."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 7), "float32"), B: T.Tensor((7, 3), "float16"), C: T.Tensor((5, 3), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_fragment((5, 7), "float32")
            b = T.alloc_shared((7, 3), "float16")
            c = T.alloc_fragment((5, 3), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    a, b, c = torch.randn(5, 7), torch.randn(7, 3).half(), torch.zeros(5, 3)
    launch(kernel, a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


WRONG_SHAPES = [
    ((8, 4), (5, 6), (8, 6), {}, "`a` (8, 4) x `b` (5, 6) -> `c` (8, 6)"),
    ((8, 4), (4, 6), (6, 8), {}, "`a` (8, 4) x `b` (4, 6) -> `c` (6, 8)"),
    ((8, 4), (4, 6), (8, 6), {"transpose_A": True}, "`a` (8, 4)^T x `b` (4, 6) -> `c` (8, 6)"),
    ((8, 4), (4, 6), (8, 6), {"transpose_B": True}, "`a` (8, 4) x `b` (4, 6)^T -> `c` (8, 6)"),
    ((2, 8, 4), (4, 6), (8, 6), {}, "`a` (2, 8, 4) x `b` (4, 6) -> `c` (8, 6)"),
    ((4,), (4, 6), (1, 6), {}, "`a` (4) x `b` (4, 6) -> `c` (1, 6)"),
]


@pytest.mark.parametrize(("a_shape", "b_shape", "c_shape", "options", "text"), WRONG_SHAPES)
def test_shapes_must_fit(a_shape, b_shape, c_shape, options, text, complaint):
    @T.prim_func
    def kernel(out: T.Tensor((1,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared(a_shape, "float16")
            b = T.alloc_shared(b_shape, "float16")
            c = T.alloc_fragment(c_shape, "float32")
            T.gemm(a, b, c, **options)  # here

    assert text in complaint(kernel, "gemm_shape")


WRONG_TYPES = [
    ("float16", "int8", "float32"), ("float16", "float16", "int32"), ("int8", "int8", "float32"),
    ("bool", "bool", "int32"), ("float16", "float16", "float8_e4m3fn"), ("int8", "int8", "int64"),
]  # fmt: skip


@pytest.mark.parametrize(("a_type", "b_type", "c_type"), WRONG_TYPES)
def test_types_must_have_a_product(a_type, b_type, c_type, complaint):
    @T.prim_func
    def kernel(out: T.Tensor((1,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((4, 4), a_type)
            b = T.alloc_shared((4, 4), b_type)
            c = T.alloc_fragment((4, 4), c_type)
            T.gemm(a, b, c)  # here

    assert f"{a_type} x {b_type} into {c_type}" in complaint(kernel, "gemm_dtype")


def test_operands_are_on_chip(findings):
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32"), C: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            b = T.alloc_shared((4, 4), "float32")
            T.gemm(A, b, C)

    assert [d.code for d in findings(kernel)] == ["gemm_scope", "gemm_scope"]
    assert "T.gemm: A `A` lives in global memory" in findings(kernel)[0].message


GPU_TYPES = [("float16", "float32"), ("bfloat16", "float32"), ("int8", "int32"), ("float64", "float64")]


@pytest.mark.parametrize(("dtype", "accum"), GPU_TYPES)
def test_a_kernel_for_gpus(dtype, accum, seed):
    """Ragged edges, a pipeline, and the tensor cores: exact in the thread interpreter, which finds no fault."""
    rng = random.Random(seed)
    M, N, K = (rng.randrange(20, 90) for _ in range(3))
    turned = rng.random() < 0.5, rng.random() < 0.5
    print(M, N, K, turned)
    a_shape, b_shape = (K, M) if turned[0] else (M, K), (N, K) if turned[1] else (K, N)

    @T.prim_func
    def kernel(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((M, N), accum)):
        with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, 32), threads=64) as (bx, by):
            a = T.alloc_shared((32, 32), dtype)
            b = T.alloc_shared((32, 32), dtype)
            c = T.alloc_fragment((32, 32), accum)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=2):
                T.copy(A[k * 32, by * 32] if turned[0] else A[by * 32, k * 32], a)
                T.copy(B[bx * 32, k * 32] if turned[1] else B[k * 32, bx * 32], b)
                T.gemm(a, b, c, *turned)
            T.copy(c, C[by * 32, bx * 32])

    x, y = (torch.randint(-4, 5, s).to(getattr(torch, dtype)) for s in (a_shape, b_shape))
    z = torch.zeros(M, N, dtype=getattr(torch, accum))
    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    findings = compiled.interpret(x, y, z)
    assert not findings, findings.report()
    want = (x.T if turned[0] else x).double() @ (y.T if turned[1] else y).double()
    torch.testing.assert_close(z.double(), want, rtol=0, atol=0)
    assert "mma.sync" in str(compiled.schedule)
    assert all(r.spills == r.stack == 0 for r in compiled.resources.values())


@pytest.mark.parametrize(("of_a", "of_b"), [("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_mixed_operands_could_be_faster(of_a: str, of_b: str) -> None:
    """No tensor core multiplies two float types; a warning and the schedule say so, and what to write."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), of_a), B: T.Tensor((64, 64), of_b), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), of_a)
            b = T.alloc_shared((64, 64), of_b)
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    with pytest.warns(UserWarning, match="slow_product") as told:
        text = str(torch_tile.compile(kernel, target="cuda:sm_90a").schedule)
    warning = str(told[0].message)
    assert (
        f"as A is {of_a} and B {of_b}" in warning and "fix: copy one of them" in warning and "T.gemm(a, b, c" in warning
    )
    assert f"A is {of_a} and B {of_b}: copy one of them" in text and "1 of what could be faster" in text
