# SPDX-License-Identifier: Apache-2.0
"""Elements more than 2**31 elements, and bytes, behind the first are found: by static sizes, dynamic ones and strides.

Fresh memory of NumPy's zeros takes room only where it is touched, so that these tensors of many GB take few pages.
"""

import math

import numpy as np
import pytest
import torch
from emulate import emulate

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError

FAR = 2**31 + 70
PART = 64
dtypes = pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)


@pytest.fixture(params=["cpu", "text", pytest.param("gpu", marks=pytest.mark.cuda)])
def run(request):
    """`run(kernel, *args)` changes the arguments, which are on `run.device`, as the compiled text does."""

    def call(kernel, *args):
        target = {"gpu": "cuda", "text": "cuda:sm_80"}.get(request.param, request.param)
        compiled = torch_tile.compile(kernel, target=target)
        if request.param == "text":
            emulate(compiled, *args)
        else:
            compiled(*args)

    call.target, call.device = request.param, "cuda" if request.param == "gpu" else "cpu"
    return call


def numbers(dtype, device, *shape):
    return torch.randint(-9, 10, shape).to(device, dtype)


def zeros(dtype, device, *shape):
    """A tensor of zeros, most of whose pages are never touched on a CPU."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def row(size, dtype):
    """The last elements of a long row, moved by a nest and by a copy, and stored in front of them."""

    @T.prim_func
    def kernel(A: T.Tensor((size,), dtype), B: T.Tensor((2, PART), dtype), first: T.int64):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((PART,), dtype)
            T.copy(A[first], s)
            T.copy(s, B[0, 0:PART])
            for i in T.Parallel(PART):
                B[1, i] = A[first + (PART - 1 - i)]
                A[first - PART + i] = s[i]

    return kernel


@dtypes
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_end_of_a_long_row(is_dynamic, dtype, run):
    a = zeros(dtype, run.device, FAR)
    a[-PART:] = numbers(dtype, run.device, PART)
    b = torch.zeros(2, PART, dtype=dtype, device=run.device)
    run(row(T.dynamic("n", "int64") if is_dynamic else FAR, dtype), a, b, FAR - PART)
    assert torch.equal(b[0], a[-PART:]) and torch.equal(b[1], a[-PART:].flip(0))
    assert torch.equal(a[-2 * PART : -PART], a[-PART:]) and not a[: 2**16].any()


def test_a_size_of_32_bits_refuses_more(run):
    """GPUs take sizes in the type that they are declared in; CPUs take all in 64 bits."""
    a, b = zeros(torch.int8, run.device, FAR), torch.zeros(2, PART, dtype=torch.int8)
    a[-PART:] = 3
    if run.target == "cpu":
        run(row(T.dynamic("n"), torch.int8), a, b, FAR - PART)
        assert (b == 3).all()
        return
    with pytest.raises(LaunchError, match=r"size `n` = 2147483718 is too large .*T\.dynamic"):
        run(row(T.dynamic("n"), torch.int8), a, b.to(run.device), FAR - PART)


def rows(columns, dtype):
    """Tiles of three long rows: block indices times sizes exceed 32 bits."""

    @T.prim_func
    def kernel(A: T.Tensor((3, columns), dtype), B: T.Tensor((3, PART), dtype)):
        with T.Kernel(3, threads=32) as b:
            f = T.alloc_fragment((PART,), dtype)
            T.copy(A[b, columns - PART], f)
            T.copy(f, B[b, 0])
            for i in T.Parallel(PART):
                A[b, i] = f[i] + f[i]

    return kernel


@dtypes
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_rows_that_lie_far_apart(is_dynamic, dtype, run):
    columns = 2**30 + 128  # of the three rows, the last begins behind 2**31
    a = zeros(dtype, run.device, 3, columns)
    a[:, -PART:] = numbers(dtype, run.device, 3, PART)
    b = torch.zeros(3, PART, dtype=dtype, device=run.device)
    run(rows(T.dynamic("n") if is_dynamic else columns, dtype), a, b)
    assert torch.equal(b, a[:, -PART:]) and torch.equal(a[:, :PART], b + b)


def strided(dtype):
    m, n, far = T.dynamic("m"), T.dynamic("n"), T.dynamic("far")

    @T.prim_func
    def kernel(A: T.StridedTensor((m, n), (far, 1), dtype), B: T.Tensor((n, m), dtype)):
        with T.Kernel(T.ceildiv(n, 16), T.ceildiv(m, 16), threads=32) as (bx, by):
            s = T.alloc_shared((16, 16), dtype)
            T.copy(A[by * 16, bx * 16], s)
            for i, j in T.Parallel(16, 16):
                if bx * 16 + i < n and by * 16 + j < m:
                    B[bx * 16 + i, by * 16 + j] = s[j, i]

    return kernel


@dtypes
def test_strides_beyond_32_bits(dtype, run):
    storage = zeros(dtype, run.device, FAR + 99)
    a = storage.as_strided((3, 37), (FAR // 2, 1))
    a.copy_(numbers(dtype, run.device, 3, 37))
    b = torch.zeros(37, 3, dtype=dtype, device=run.device)
    run(strided(dtype), a, b)
    assert torch.equal(b, a.t())
