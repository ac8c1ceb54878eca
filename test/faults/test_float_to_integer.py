# SPDX-License-Identifier: Apache-2.0
"""Floats as integers: truncated; the ends of the type stand for what is beyond them, 0 for NaN; on every target."""

import math

import pytest
import torch
from emulate import emulate

import torch_tile
import torch_tile.language as T
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import Cast, Const, cast
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate as run_tiles

FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
N = 128


def numbers(source):
    """The ends of every integer type and their neighbours, all sizes, infinities and NaN, as values of a float type."""
    dtype = getattr(torch, source)
    ends = torch.tensor([float(end) for to in INTEGERS for end in dt.limits(dt.to_dtype(to))], dtype=torch.float64)
    near = torch.tensor([0.5, -0.5, 0.99, -0.99, 1.0, -1.0, 1.5, -2.5, math.inf, -math.inf, math.nan, 0.0, -0.0])
    all_ends = torch.cat([ends, ends * (1 + 2**-22), ends * (1 - 2**-22), ends + 1, ends - 1])
    some = torch.randn(N, dtype=torch.float64) * torch.exp2(torch.randint(-3, 70, (N,)).double())
    found = torch.cat([near.double(), all_ends, some])[:N]
    return found.to(torch.float32).to(dtype) if dtype.itemsize == 1 else found.to(dtype)


def reference(x, to):
    """By Python's integers."""
    low, high = dt.limits(dt.to_dtype(to))
    values = x.double().tolist()
    return [0 if math.isnan(v) else high if v > high else low if v < low else int(v) for v in values]


def integers(x):
    """The integers of a tensor; torch lists unsigned ones, too."""
    return [int(v) for v in x.numpy().reshape(-1)]


def kernel_of(source):
    @T.prim_func
    def kernel(A: T.Tensor((N,), source), *results: [T.Tensor((N,), to) for to in INTEGERS]):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                for result, to in zip(results, INTEGERS, strict=True):
                    result[i] = T.cast(A[i], to)

    return kernel


@pytest.mark.parametrize("source", FLOATS)
def test_all_pairs_of_types(source):
    check(source, ("tiles", "cpu", "cuda:sm_80 threads", "cuda:sm_80 text"))


@pytest.mark.cuda
@pytest.mark.parametrize("source", FLOATS)
def test_all_pairs_of_types_on_a_gpu(source):
    check(source, ("cuda",))


def check(source, ways):
    x, kernel = numbers(source), kernel_of(source)
    wanted = [reference(x, to) for to in INTEGERS]
    for way in ways:
        results = [torch.full((N,), 77, dtype=getattr(torch, to)) for to in INTEGERS]
        if way == "tiles":
            run_tiles(kernel, x, *results)
        elif way == "cpu":
            torch_tile.compile(kernel, target="cpu")(x, *results)
        elif way == "cuda":
            there = [t.cuda() for t in (x, *results)]
            torch_tile.compile(kernel, target="cuda")(*there)
            results = [t.cpu() for t in there[1:]]
        else:
            made = torch_tile.compile(kernel, target="cuda:sm_80")
            if way.endswith("text"):
                emulate(made, x, *results)
            else:
                assert not interpret(made.lowered, made.program, [x, *results])
        for to, found, want in zip(INTEGERS, results, wanted, strict=True):
            wrong = [(v, a, b) for v, a, b in zip(x.tolist(), integers(found), want, strict=True) if a != b]
            assert not wrong, f"{way}: {source} as {to}: {wrong[:5]}"


@pytest.mark.parametrize("to", INTEGERS)
def test_constants_are_folded_by_the_same_rule(to):
    for source in ("float32", "float64"):
        x = numbers(source)
        for value, want in zip(x.tolist(), reference(x, to), strict=True):
            given = Const(value, dt.to_dtype(source))
            folded = cast(given, to)
            assert isinstance(folded, Const) and folded.value == want and type(folded.value) is int, (value, to)
            assert evaluate(Cast(dt.to_dtype(to), given), {}) == want


def test_types_of_few_bits_saturate_too():
    x = torch.tensor([7.9, 8.0, -8.9, -9.0, 100.0, math.inf, -math.inf, math.nan])

    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((2, 8), "int8")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[0, i] = T.cast(T.cast(A[i], "int4"), "int8")
                B[1, i] = T.cast(T.cast(A[i], "uint2"), "int8")

    found = torch.zeros(2, 8, dtype=torch.int8)
    torch_tile.compile(kernel, target="cpu")(x, found)
    assert found.tolist() == [[7, 7, -8, -8, 7, 7, -8, 0], [3, 3, 0, 0, 3, 3, 0, 0]]


def test_what_was_rounded_before_saturates():
    x = torch.tensor([254.5, 255.5, -0.6, 3e9, math.nan, math.inf])

    @T.prim_func
    def kernel(A: T.Tensor((6,), "float32"), B: T.Tensor((6,), "uint8")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(6):
                B[i] = T.cast(A[i], "uint8", round="ru")

    found = torch.zeros(6, dtype=torch.uint8)
    torch_tile.compile(kernel, target="cpu")(x, found)
    assert found.tolist() == [255, 255, 0, 255, 0, 255]


@pytest.mark.parametrize("source", FLOATS)
def test_sums_of_converted_floats_wrap(source, way, seed):
    """A float has far more to its value than bits, so that sums beside an index were taken for short ones."""
    torch.manual_seed(seed)

    @T.prim_func
    def kernel(A: T.Tensor((N,), source), O: T.Tensor((5, N), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                O[0, i] = i - T.cast(A[i], "int64")
                O[1, i] = T.cast(A[i], "int64") + (i + 1)
                O[2, i] = T.cast(A[i], "int64") * (i + 2)
                O[3, i] = -T.cast(A[i], "int64")
                O[4, i] = i % 5 - T.cast(A[i], "int64") // (i | 1)

    x, found = numbers(source), torch.zeros(5, N, dtype=torch.int64)
    way(kernel, x, found)
    whole = list(enumerate(reference(x, "int64")))
    forms = [
        lambda i, v: i - v,
        lambda i, v: v + i + 1,
        lambda i, v: v * (i + 2),
        lambda i, v: -v,
        lambda i, v: i % 5 - v // (i | 1),
    ]
    wanted = [[(form(i, v) + 2**63) % 2**64 - 2**63 for i, v in whole] for form in forms]
    assert found.tolist() == wanted
