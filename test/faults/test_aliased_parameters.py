# SPDX-License-Identifier: Apache-2.0
"""Calls that give one tensor for a read and a written parameter, where each block reads before it writes."""

import warnings

import pytest
import torch

import torch_tile
import torch_tile.language as T

ROWS, COLUMNS = 37, 32  # the last of three blocks has five rows of 16


@T.prim_func
def turned(x: T.Tensor((ROWS, COLUMNS), "float32"), out: T.Tensor((ROWS, COLUMNS), "float32")):
    """Rows by way of a tile, from right to left."""
    with T.Kernel(T.ceildiv(ROWS, 16), threads=64) as bx:
        tile = T.alloc_shared((16, COLUMNS), "float32")
        T.copy(x[bx * 16, 0], tile)
        for i, j in T.Parallel(16, COLUMNS):
            if bx * 16 + i < ROWS:
                out[bx * 16 + i, j] = tile[i, COLUMNS - 1 - j] + 1


@T.prim_func
def twice_read(x: T.Tensor((ROWS, COLUMNS), "float32"), out: T.Tensor((ROWS, COLUMNS), "float32")):
    """A store between two reads of an element: the second sees what was stored."""
    with T.Kernel(T.ceildiv(ROWS, 16), threads=64) as bx:
        for i, j in T.Parallel(16, COLUMNS):
            if bx * 16 + i < ROWS:
                out[bx * 16 + i, j] = x[bx * 16 + i, j] * 2
                out[bx * 16 + i, j] = x[bx * 16 + i, j] + 1


@T.prim_func
def two_kernels(x: T.Tensor((ROWS, COLUMNS), "float32"), out: T.Tensor((ROWS, COLUMNS), "float32")):
    """The second kernel reads what the first one stored."""
    with T.Kernel(ROWS, threads=32) as bx:
        for j in T.Parallel(COLUMNS):
            out[bx, j] = x[bx, j] * 2
    with T.Kernel(ROWS, threads=32) as bx:
        for j in T.Parallel(COLUMNS):
            out[bx, j] = x[bx, j] + out[bx, j]


@T.prim_func
def late_product(x: T.Tensor((32, 32), "float16"), out: T.Tensor((32, 32), "float16")):
    """A product whose right operand was staged before its tensor is cleared."""
    with T.Kernel(1, threads=128) as _:
        left, right = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
        acc = T.alloc_fragment((32, 32), "float32")
        T.copy(x, left)
        T.copy(x, right)
        T.clear(acc)
        for i, j in T.Parallel(32, 32):
            out[i, j] = 0
        T.gemm(left, right, acc)
        T.copy(acc, out)


@T.prim_func
def pipelined(x: T.Tensor((64, 128), "float16"), w: T.Tensor((128, 128), "float16"),
              out: T.Tensor((64, 128), "float16")):  # fmt: skip
    """A block's rows times a matrix, over a pipelined loop."""
    with T.Kernel(1, threads=128) as _:
        left, right = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 128), "float16")
        acc = T.alloc_fragment((64, 128), "float32")
        T.clear(acc)
        for k in T.Pipelined(4, num_stages=2):
            T.copy(x[0, k * 32], left)
            T.copy(w[k * 32, 0], right)
            T.gemm(left, right, acc)
        T.copy(acc, out)


@T.prim_func
def summed(x: T.Tensor((ROWS, COLUMNS), "float32"), y: T.Tensor((ROWS, COLUMNS), "float32"),
           out: T.Tensor((ROWS, COLUMNS), "float32"), rest: T.Tensor((ROWS, COLUMNS), "float32")):  # fmt: skip
    """Two reads and two results, of which any may be one tensor."""
    with T.Kernel(ROWS, threads=32) as bx:
        for j in T.Parallel(COLUMNS):
            out[bx, j] = x[bx, j] + y[bx, j]
        for j in T.Parallel(COLUMNS):
            rest[bx, j] = x[bx, j] - y[bx, j]


m, n, step = T.dynamic("m, n, step")


@T.prim_func
def of_any_size(x: T.StridedTensor((m, n), (step, 1), "float32"), out: T.StridedTensor((m, n), (step, 1), "float32")):
    """Rows of a size that the call brings, each by one block."""
    with T.Kernel(m, threads=32) as bx:
        for j in T.Parallel(n):
            out[bx, j] = x[bx, j] * 2 + 1


def doubled(x):
    return x * 2 + 1


HALVES = {"dtype": torch.float16}
KINDS = {
    "a tile": (turned, (ROWS, COLUMNS), {}, lambda x: x.flip(1) + 1),
    "a store between reads": (twice_read, (ROWS, COLUMNS), {}, doubled),
    "two kernels": (two_kernels, (ROWS, COLUMNS), {}, lambda x: x * 4),
    "a staged operand": (late_product, (32, 32), HALVES, lambda x: x @ x),
    "any size": (of_any_size, (5, 23), {}, doubled),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_in_the_place_of_its_operand(way, kind, seed):
    kernel, shape, options, meaning = KINDS[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**options)
    want = meaning(x.double())
    way(kernel, x, x)
    torch.testing.assert_close(x.double(), want, rtol=2e-3 if options else 1e-6, atol=2e-3 if options else 1e-6)


def test_a_pipelined_operand(way, seed):
    draw = torch.Generator().manual_seed(seed)
    x, w = torch.randn(64, 128, generator=draw).half(), torch.randn(128, 128, generator=draw).half() / 12
    want = x.double() @ w.double()
    way(pipelined, x, w, x)
    torch.testing.assert_close(x.double(), want, rtol=2e-3, atol=2e-3)


def sum_of(x, y, out, rest):
    """What `summed` stores, element by element, whatever the tensors share."""
    out.copy_(x + y)
    rest.copy_(x - y)


@pytest.mark.parametrize("places", [(0, 1, 0, 2), (0, 1, 2, 1), (0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 0, 0), (0, 0, 0, 0)])
def test_any_of_several_parameters(way, places, seed):
    given = list(torch.randn(3, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)))
    wanted = [x.double() for x in given]
    sum_of(*(wanted[n] for n in places))
    way(summed, *(given[n] for n in places))
    for n in set(places):
        torch.testing.assert_close(given[n].double(), wanted[n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a", "cuda:sm_120a"])
def test_the_variant_sees_one_buffer(target):
    kernel = torch_tile.compile(pipelined, target=target)
    x, w, out = torch.zeros(64, 128).half(), torch.zeros(128, 128).half(), torch.zeros(64, 128).half()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variant = kernel.specialised(x, w, x.view(64, 128))
    assert variant is kernel.specialised(x, w, x) is not kernel and kernel.specialised(x, w, out) is kernel
    assert kernel.launcher.disjoint == ((0, 2), (1, 2)) and variant.launcher.disjoint == ((1, 2),)
    assert kernel.specialised(x, x[:1].expand(128, 128), out) is kernel  # both are read
    if target != "cpu":
        used = [n for entry in variant.launcher.source.entries for n in positions(entry.args)]
        assert set(used) == {1, 2}


def positions(args):
    """The positions of the tensors that a kernel gets, by pointer or by map."""
    return [each if isinstance(each, int) else each.position for each in args]


def test_a_variant_reads_nothing_as_constant():
    text = torch_tile.compile(turned, target="cuda:sm_80").specialised(*[torch.zeros(ROWS, COLUMNS)] * 2).source
    assert "const float* __restrict__" not in text and "(float* out)" in text


def test_a_variant_of_another_variant_is_none():
    kernel = torch_tile.compile(summed, target="cuda:sm_90a")
    a, b, c = torch.zeros(3, ROWS, COLUMNS)
    first = kernel.specialised(a, b, a, c)
    assert first.launcher.disjoint == ((1, 2), (1, 3))
    whole = kernel.specialised(a, a, a, a)
    assert not whole.launcher.disjoint and whole.specialised(a, a, a, a) is whole
