# SPDX-License-Identifier: Apache-2.0
"""Roles as authors write them, and the order in which a kernel has them."""

import pytest

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import alike, walk
from torch_tile.ir.stmt import Alloc, Role
from torch_tile.ir.verify import Stage, verify

TENSOR = T.Tensor((64,), "float32")


def roles(kernel):
    verify(kernel.program, Stage.TILE)
    return [s for s in kernel.program.kernels[0].body.stmts if isinstance(s, Role)]


def test_roles():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=384) as _:
            with T.role(256, 128, registers=24):
                A[1] = 1.0
            with T.role(0, 64):
                c = T.alloc_fragment((64, 8), "float32", layout="[64:1t | 8:1r]")
                for i, j in T.Parallel(64, 8, loop_layout="[64:1t | 8:1r]"):
                    c[i, j] = 0.0
        with T.Kernel(1, threads=384) as _:
            with T.ws(2, registers=32):
                A[0] = 1.0
            with T.ws(1, 0):
                A[0] = 1.0

    producer, small = roles(kernel)
    assert (producer.first, producer.count, producer.registers, producer.by_hand) == (256, 128, 24, False)
    assert str(small.body.stmts[0].buffer.layout) == "[64:1t | 8:1r]"  # of the role's own threads
    assert producer.span.source().strip() == "with T.role(256, 128, registers=24):"
    third, both = kernel.program.kernels[1].body.stmts
    assert (third.first, third.count, third.registers, third.by_hand) == (256, 128, 32, True)
    assert (both.first, both.count, both.registers) == (0, 256, 0)
    assert "with T.ws(2, registers=32):" in repr(kernel) and "with T.ws(0, 1):" in repr(kernel)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: T.role(128, 128), "first"),
        (lambda: T.role(16, 32), "first"),
        (lambda: T.role(0, 100), "count"),
        (lambda: T.role(96, 64), "count"),
        (lambda: T.role(0, 64, registers=24), "count"),
        (lambda: T.role(0, 128, registers=20), "registers"),
        (lambda: T.ws(), "groups"),
        (lambda: T.ws(0, 2), "groups"),
        (lambda: T.ws(1), "groups"),
        (lambda: T.ws(-1), "groups"),
        (lambda: T.ws("a"), "groups"),
        (lambda: T.ws(0, registers=264), "registers"),
    ],
)
def test_wrong_roles(make, name):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=128) as _:
                make()

    assert caught.value.code == "bad_argument" and f"`{name}`" in str(caught.value)


def in_loops():
    @T.prim_func
    def kernel(A: TENSOR, B: TENSOR):
        with T.Kernel(1, threads=256) as b:
            c = T.alloc_fragment((64,), "float32")
            turn = T.alloc_var("int32", 0)
            with T.ws(0):
                T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                at = k % 4
                if b + k > 3:
                    with T.ws(1):
                        B[at] = 1.0
                    with T.ws(0):
                        A[at] = turn
                turn += 1
            with T.ws(0):
                T.copy(c, A)

    return kernel


def apart():
    @T.prim_func
    def kernel(A: TENSOR, B: TENSOR):
        with T.Kernel(1, threads=256) as b:
            turn = T.alloc_var("int32", 0)
            with T.ws(0):
                c = T.alloc_fragment((64,), "float32")
                T.clear(c)
                for k in T.serial(8):
                    at = k % 4
                    if b + k > 3:
                        A[at] = turn
                    turn += 1
                T.copy(c, A)
            with T.ws(1):
                for k in T.serial(8):
                    at = k % 4
                    if b + k > 3:
                        B[at] = 1.0
                    turn += 1

    return kernel


def test_roles_in_loops_run_the_loop_each_by_itself():
    found = in_loops()
    assert [(r.first, r.count) for r in roles(found)] == [(0, 128), (128, 128)]
    assert alike(found.program, apart().program), f"{found}\n{apart()}"


def test_while_loops_and_breaks():
    def written(nested):
        @T.prim_func
        def kernel(A: TENSOR, n: T.int32):
            with T.Kernel(1, threads=256) as _:
                turn = T.alloc_var("int32", 0)
                if nested:
                    while turn < n:
                        if turn == 7:
                            break
                        with T.ws(0):
                            A[turn] = 1.0
                        with T.ws(1):
                            A[turn + 8] = 2.0
                        turn += 1
                else:
                    with T.ws(0):
                        while turn < n:
                            if turn == 7:
                                break
                            A[turn] = 1.0
                            turn += 1
                    with T.ws(1):
                        while turn < n:
                            if turn == 7:
                                break
                            A[turn + 8] = 2.0
                            turn += 1

        return kernel

    assert alike(written(True).program, written(False).program)


def test_what_only_names_something_stands_before_the_roles():
    @T.prim_func
    def kernel(A: TENSOR):
        with T.Kernel(2, threads=256) as b:
            with T.ws(0):
                A[0] = 1.0
            first = b * 32
            with T.ws(1):
                A[first] = 2.0
            value = A[5]  # what a role wrote: everybody reads it afterwards
            with T.ws(0):
                A[1] = value

    names = [type(s).__name__ for s in kernel.program.kernels[0].body.stmts]
    assert names == ["Let", "Role", "Role", "Let", "Role"]


def test_each_role_has_fragments_of_its_own():
    @T.prim_func
    def kernel(A: TENSOR, B: TENSOR):
        with T.Kernel(1, threads=384) as _:
            c = T.alloc_fragment((64,), "float32")
            d = T.alloc_fragment((64,), "float32")
            T.copy(B, d)
            with T.ws(0):
                T.copy(A, c)
            with T.ws(1, 2):
                T.copy(B, c)
            T.copy(d, A)

    assert [type(s).__name__ for s in kernel.program.kernels[0].body.stmts] == ["Alloc", "Copy", "Role", "Role", "Copy"]
    (one,), (other,) = ([n.buffer for n in walk(r) if isinstance(n, Alloc)] for r in roles(kernel))
    assert one is not other and one.name == other.name == "c"


@pytest.mark.parametrize("where", ["before", "in the loop", "both"])
def test_registers(where):
    @T.prim_func
    def kernel(A: TENSOR):
        with T.Kernel(1, threads=384) as _:
            if where != "in the loop":
                with T.ws(0, 1):
                    T.inc_max_nreg(240)
            with T.ws(2):
                T.set_max_nreg(24, 0)
                T.no_set_max_nreg()
            for k in T.serial(4):
                with T.ws(2):
                    A[k] = 1.0
                with T.ws(0, 1):
                    if where != "before":
                        T.set_max_nreg(240, 1)
                    A[k + 4] = 1.0

    assert sorted((r.first, r.registers) for r in roles(kernel)) == [(0, 240), (256, 24)]
    assert "set_registers" not in repr(kernel)
