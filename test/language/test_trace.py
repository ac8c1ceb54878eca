# SPDX-License-Identifier: Apache-2.0
"""After tracing, every statement and expression knows its line and columns, and every symbol its name and scope."""

import threading

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError, current_span, span_source
from torch_tile.ir.expr import Binary, Call, Cast, Load, Select
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import (
    Alloc,
    Assert,
    For,
    If,
    Kernel,
    Let,
    Print,
    Stmt,
    Store,
    TileOp,
    While,
)
from torch_tile.language.trace import is_tracing, tracer
from torch_tile.simulator.tile.interpreter import evaluate


@T.prim_func
def sample(A: T.Tensor((64,), "float16"), n: T.int32):
    with T.Kernel(n, threads=32) as bx:
        tile = T.alloc_shared((8,), "float16")
        count = T.alloc_var("int32", 0)
        T.copy(A[bx * 8], tile)
        for i in T.Parallel(8):
            shifted = A[bx * 8 + i] + tile[7 - i]
            tile[i] = T.exp(shifted) * 0.5 if n > i else T.max(shifted, 1.0)
        while count < n and n > 3:
            count += 1
            if count == 2:
                T.device_assert(tile[0] > 0.0, "größer × 2")
                T.print(tile[count])
        T.gemm(
            tile, tile,
            tile,
        )  # fmt: skip


def text_of(node):
    span = node.span
    assert span.file == __file__
    source = span.source()
    return source[span.column : span.end_column] if span.end_line == span.line else source[span.column :]


def texts(kind):
    return [text_of(n) for n in walk(sample.program) if isinstance(n, kind)]


def test_statements_know_their_place():
    assert texts(Kernel) == ["T.Kernel(n, threads=32)"]
    assert texts(Alloc) == ['T.alloc_shared((8,), "float16")', 'T.alloc_var("int32", 0)']
    assert texts(TileOp) == ["T.copy(A[bx * 8], tile)", "T.gemm("]
    assert texts(Let) == ["shifted = A[bx * 8 + i] + tile[7 - i]"]
    assert texts(Store) == ["tile[i]", "count += 1"]
    assert texts(Assert) == ['T.device_assert(tile[0] > 0.0, "größer × 2")']
    assert texts(Print) == ["T.print(tile[count])"]
    assert [t.split(":")[0] for t in texts(For)] == ["for i in T.Parallel(8)"]
    assert [t.split(":")[0] for t in texts(While)] == ["while count < n and n > 3"]
    assert [t.split(":")[0] for t in texts(If)] == ["if count == 2"]


def test_expressions_know_their_place():
    assert {"A[bx * 8 + i]", "tile[7 - i]", "tile[0]", "tile[count]"} <= set(texts(Load))
    assert {"bx * 8", "bx * 8 + i", "7 - i", "tile[0] > 0.0", "count < n", "n > 3", "T.exp(shifted) * 0.5"} <= set(
        texts(Binary)
    )
    assert texts(Call) == ["T.exp(shifted)"]
    assert [t.startswith("T.exp(shifted) * 0.5 if n > i else") for t in texts(Select)] == [True]


def test_lines_are_those_of_the_file():
    with open(__file__) as file:
        lines = file.read().splitlines()
    for node in walk(sample.program):
        if isinstance(node, Stmt) and node.span is not None:
            assert lines[node.span.line - 1] == node.span.source()
    assert all(n.span is not None for n in walk(sample.program) if isinstance(n, Store | TileOp | For | If | Let))


def test_spans_are_taken_only_while_tracing():
    assert not span_source and current_span() is None and not is_tracing()
    with pytest.raises(TileError, match="`this thing` is used outside"):
        tracer("this thing")


def test_a_failed_trace_leaves_nothing_behind():
    with pytest.raises(TileError, match="ZeroDivisionError"):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                A[0] = 1 // 0

    assert not span_source and not is_tracing()


def test_names_are_the_authors():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(2, 3) as (left, right):
            staged = T.alloc_shared((4, 4), "float32")
            best = T.alloc_var("float32", 0.0)
            for row, column in T.Parallel(4, 4):
                staged[row, column] = A[row, column] + left * right
            best = staged[0, 0]
            A[0, 0] = best

    text = repr(kernel)
    for line in (
        "with T.Kernel(2, 3, threads=128) as (left, right):",
        "staged = T.alloc_shared((4, 4), T.float32)",
        "best = T.alloc_var(T.float32, 0.0)",
        "for row, column in T.Parallel(4, 4):",
        "best = staged[0, 0]",
    ):
        assert line in text


def test_conversions_are_placed_at_the_operation():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float16"), x: T.float32):
        with T.Kernel(1) as _:
            A[0] = A[1] + x  # converts both ways

    casts = [n for n in walk(kernel.program) if isinstance(n, Cast)]
    assert len(casts) == 2 and all("# converts both ways" in n.span.source() for n in casts)


def test_threads_trace_by_themselves():
    results, start = {}, threading.Barrier(4)

    def build(number):
        start.wait()
        for _ in range(5):

            @T.prim_func
            def kernel(A: T.Tensor((4,), "float32")):
                with T.Kernel(1) as _:
                    for i in T.serial(4):
                        A[i] = number + i

            results[number] = kernel

    threads = [threading.Thread(target=build, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        a = torch.zeros(4)
        evaluate(results[number], a)
        assert a.tolist() == [number, number + 1, number + 2, number + 3]
