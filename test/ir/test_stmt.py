# SPDX-License-Identifier: Apache-2.0
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var, const, natural
from torch_tile.ir.stmt import Block, Kernel, Program, Store, dimensions

M, N, K, S = (Var(n, dt.int32, "dim") for n in "MNKS")
zero = const(0, dt.int32)
A = Buffer("A", (M * 2, K), dt.float32, "global", (S, const(1, dt.int32)), "param")


def test_a_block_never_holds_a_block():
    one, two, three = (Store(A, (zero, zero), natural(v)) for v in (1.0, 2.0, 3.0))
    block = Block((one, Block((two, Block((three,)), Block(()))), one))
    assert block.stmts == (one, two, three, one)
    assert Block(()).stmts == ()


def test_dimensions_in_order_of_appearance():
    out = Buffer("out", (N, M), dt.float32, "global", None, "empty")
    scratch = Buffer("scratch", (K, Var("W", dt.int32, "dim")), dt.float32, "global", None, "workspace")
    n = Var("n", dt.int32, "param")
    kernel = Kernel((n,), (Var("bx", dt.int32, "block"),), (32,), Block(()))
    program = Program("main", (n, A), (kernel,), (scratch,), (out,))
    assert [d.name for d in dimensions(program)] == ["M", "K", "S", "W", "N"]
