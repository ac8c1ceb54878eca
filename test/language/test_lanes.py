# SPDX-License-Identifier: Apache-2.0
"""Neighbours at once: accesses of every width and type, pairs, and atomic updates of them."""

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

TYPES = ["float32", "float16", "bfloat16", "int8", "uint16", "int32", "float64", "int64"]
LDG = getattr(T, "__ldg")


def numbers(dtype, *shape):
    kind = getattr(torch, dtype)
    return torch.randn(shape).to(kind) if kind.is_floating_point else torch.randint(-100, 100, shape).to(kind)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_global_memory(width, dtype, way, seed):
    """What is loaded is stored as it is, and as words; where the predicate does not hold, zeros or nothing."""
    count = width // getattr(torch, dtype).itemsize // 8
    if count == 0:
        return
    words, size = width // 32, 16 * count

    @T.prim_func
    def kernel(
        A: T.Tensor((size,), dtype), B: T.Tensor((3, size), dtype), W: T.Tensor((16 * words,), "uint32"), n: T.int32
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                value = getattr(T, f"ldg{width}")(A[i * count])
                getattr(T, f"stg{width}")(B[0, i * count], value)
                for k, word in enumerate([value] if width == 32 else value):
                    W[i * words + k] = word
                some = getattr(T, f"ldg{width}")(A[i * count : i * count + count], pred=i < n)
                getattr(T, f"stg{width}")(B[1, i * count : i * count + count], some)
                getattr(T, f"stg{width}")(B[2, i * count], value, pred=i < n)

    a, b, w = numbers(dtype, size), torch.zeros(3, size, dtype=getattr(torch, dtype)), torch.zeros(16 * words).int()
    w = w.view(torch.uint32)
    way(kernel, a, b, w, 5)
    kept = a.clone()
    kept[5 * count :] = 0
    assert torch.equal(b[0].view(torch.uint8), a.view(torch.uint8))
    assert torch.equal(w.view(torch.uint8), a.view(torch.uint8))
    assert torch.equal(b[1], kept) and torch.equal(b[2], kept)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_shared_memory(width, way, seed):
    count = width // 16

    @T.prim_func
    def kernel(A: T.Tensor((8 * count,), "float16"), B: T.Tensor((8 * count,), "float16")):
        with T.Kernel(1, threads=32):
            one, other = (T.alloc_shared((8 * count,), "float16") for _ in range(2))
            T.copy(A, one)
            for i in T.Parallel(8):
                getattr(T, f"sts{width}")(other[i * count], getattr(T, f"lds{width}")(one[i * count]))
            T.copy(other, B)

    a, b = numbers("float16", 8 * count), torch.zeros(8 * count).half()
    way(kernel, a, b)
    assert torch.equal(a, b)


def test_a_gpu_makes_one_instruction():
    @T.prim_func
    def kernel(A: T.Tensor((512,), "float16"), B: T.Tensor((512,), "float16")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            T.stg128(B[tx * 8], T.ldg128(A[tx * 8]))

    made = tilelang.compile(kernel, target="cuda:sm_80")
    assert made.get_kernel_source().count("vector_copy<16>") == 2
    a, b = torch.randn(512).half(), torch.zeros(512).half()
    assert not made.interpret(a, b) and torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pairs(dtype, way, seed):
    @T.prim_func
    def kernel(A: T.Tensor((3, 32), dtype), B: T.Tensor((8, 32), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                x, y, z = (A[n, 2 * i : 2 * i + 2] for n in range(3))
                B[0, 2 * i : 2 * i + 2] = T.add2(x, y)
                B[1, 2 * i : 2 * i + 2] = T.sub2(x, y)
                B[2, 2 * i : 2 * i + 2] = T.mul2(x, y)
                B[3, 2 * i : 2 * i + 2] = T.fma2(x, y, z)
                B[4, 2 * i : 2 * i + 2] = T.max2(x, y)
                B[5, 2 * i : 2 * i + 2] = T.min2(x, y)
                B[6, 2 * i : 2 * i + 2] = T.abs2(x)
                B[7, 2 * i : 2 * i + 2] = T.add2(T.mul2(x, y), z)

    a, b = torch.randint(-8, 8, (3, 32)).to(getattr(torch, dtype)), torch.zeros(8, 32, dtype=getattr(torch, dtype))
    way(kernel, a, b)
    x, y, z = a
    wanted = [x + y, x - y, x * y, x * y + z, torch.maximum(x, y), torch.minimum(x, y), x.abs(), x * y + z]
    assert torch.equal(b, torch.stack(wanted))


def test_pairs_of_vectors(way, seed):
    """Elements of two lanes, and what wide loads give, as vectors of other types."""

    @T.prim_func
    def kernel(A: T.Tensor((16,), "float16x2"), B: T.Tensor((16,), "float16x2"), C: T.Tensor((32,), "float16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                B[i] = T.add2(A[i], A[i])
                two = T.reinterpret(T.ldg32(A[i]), "float16x2")
                C[2 * i : 2 * i + 2] = T.mul2(two, two)

    a = torch.randint(-8, 8, (16, 2)).half()
    b, c = torch.zeros(16, 2).half(), torch.zeros(32).half()
    way(kernel, a, b, c)
    assert torch.equal(b, a + a) and torch.equal(c, (a * a).reshape(32))


@pytest.mark.parametrize("count", [2, 4])
def test_atomic_updates_give_what_was_there(count):
    size = 64 * count

    @T.prim_func
    def kernel(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32"), P: T.Tensor((size,), "float32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            at = tx * count
            found = getattr(T, f"atomic_addx{count}")(A[at], B[at], return_prev=True)
            for n in range(count):
                P[at + n] = found[n]

    a, b, p = torch.randn(64 * count), torch.randn(64 * count), torch.zeros(64 * count)
    before = a.clone()
    findings = tilelang.compile(kernel, target="cuda:sm_80").interpret(a, b, p)
    assert not findings, findings.report()
    assert torch.equal(p, before) and torch.equal(a, before + b)


def test_elements_by_the_read_only_cache(way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = LDG(A[i]) + LDG(A, 7 - i)

    a, b = torch.randn(8), torch.zeros(8)
    way(kernel, a, b)
    assert torch.equal(b, a + a.flip(0))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda A, s: T.ldg32(s[0]), lambda A, s: T.lds64(A[0]), lambda A, s: T.ldg64(A[0:3]), lambda A, s: T.ldg128(3),
        lambda A, s: T.stg64(A[0], T.ldg128(A[0])), lambda A, s: T.add2(A[0:3], A[0:3]), lambda A, s: T.add2(1.0, 2.0),
        lambda A, s: A.__setitem__(slice(0, 3), T.add2(A[0:2], A[0:2])), lambda A, s: LDG(s[0:2]),
        lambda A, s: T.atomic_addx4(A[0], T.add2(A[0:2], A[0:2])),
    ],
)  # fmt: skip
def test_what_is_refused(wrong):
    with pytest.raises(TileError, match="fix:"):

        @T.prim_func
        def kernel(A: T.Tensor((16,), "float32")):
            with T.Kernel(1, threads=32):
                wrong(A, T.alloc_shared((16,), "float32"))
