# SPDX-License-Identifier: Apache-2.0
"""How a reduction is divided over registers, lanes and warps. That its numbers are right is for test_reduce.py."""

import random

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Var, const
from torch_tile.ir.layout import Digit, Layout
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, For
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.tileop.reduce.op import REDUCTIONS
from torch_tile.tileop.reduce.threads import accumulator, result_layout, steps_of
from torch_tile.tileop.threads import ThreadContext


def digits(*parts):
    return tuple(Digit(*p) for p in parts)


def accumulators(warps_m, rows, columns, warps_n=1):
    """mma accumulators: `rows` times `columns` tiles of 16 x 8 in each of `warps_m * warps_n` warps."""
    return Layout(
        (
            digits((warps_m, 32 * warps_n, "t"), (rows, 4 * columns, "r"), (2, 2, "r"), (8, 4, "t")),
            digits((warps_n, 32, "t"), (columns, 4, "r"), (4, 1, "t"), (2, 1, "r")),
        )
    )


def tile(name, shape, layout=None, scope="fragment", dtype=dt.float32):
    return Buffer(name, tuple(const(n, dt.int32) for n in shape), dtype, scope, layout=layout)


def lowered(layout, shape, dim, threads, kind="sum", clear=True, build=None):
    """What one thread does, the result lying where nothing moves."""
    source = tile("a", shape, layout)
    target = tile("b", [n for d, n in enumerate(shape) if d != dim])
    op = REDUCTIONS[kind].build(source, target, dim, clear)
    result = result_layout(op, layout, {dim})
    op = REDUCTIONS[kind].build(source, tile("b", [n for d, n in enumerate(shape) if d != dim], result), dim, clear)
    thread = Var("thread", dt.int32, "thread")
    return op.lower_cuda(ThreadContext(build or Build(Target("cuda", 90)), thread, threads, Ranges()))


def calls(stmt, name):
    return [n for n in walk(stmt) if isinstance(n, Call) and n.name == name]


def test_rows_of_one_warp_need_shuffles_only():
    stmt = lowered(accumulators(4, 1, 8), (64, 64), 1, 128)
    assert [c.args[1].value for c in calls(stmt, "shuffle_xor")] == [1, 2]
    assert [a.buffer.scope for a in walk(stmt) if isinstance(a, Alloc)] == ["local"]


def test_rows_of_two_warps_meet_in_shared_memory():
    stmt = lowered(accumulators(2, 2, 4, 2), (64, 64), 1, 128)
    (scratch,) = (a.buffer for a in walk(stmt) if isinstance(a, Alloc) and a.buffer.scope == "shared")
    assert scratch.static_shape == (2, 64)
    assert len(calls(stmt, "shuffle_xor")) == 2


def test_columns_cross_lanes_and_warps():
    stmt = lowered(accumulators(4, 1, 8), (64, 64), 0, 128)
    assert [c.args[1].value for c in calls(stmt, "shuffle_xor")] == [4, 8, 16]
    (scratch,) = (a.buffer for a in walk(stmt) if isinstance(a, Alloc) and a.buffer.scope == "shared")
    assert scratch.static_shape == (4, 64), "one entry for each warp"


@pytest.mark.parametrize(
    ("threads", "masks", "entries"),
    [(12, [1, 2], 3), (15, [], 15), (96, [1, 2, 4, 8, 16], 3), (384, [1, 2, 4, 8, 16], 12)],
)
def test_threads_that_are_no_power_of_two_meet_in_shared_memory(threads, masks, entries):
    layout = Layout((digits((2, threads, "t")), digits((3, 1, "r"), (threads, 1, "t"))))
    stmt = lowered(layout, (2, 3 * threads), 1, 2 * threads)
    (scratch,) = (a.buffer for a in walk(stmt) if isinstance(a, Alloc) and a.buffer.scope == "shared")
    assert scratch.static_shape == (entries, 2)
    assert [c.args[1].value for c in calls(stmt, "shuffle_xor")] == masks


def folding(threads, shape, dim, scope, kind):
    """A reduction or scan of a tile of memory or registers, and the shape of its result."""
    rest = shape if kind == "scan" else tuple(n for d, n in enumerate(shape) if d != dim) or (1,)

    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(rest, "float32")):
        with T.Kernel(1, threads=threads) as _:
            a = T.alloc_shared(shape, "float32") if scope == "shared" else T.alloc_fragment(shape, "float32")
            T.copy(A, a)
            if kind == "scan":
                T.cumsum(a, dim=dim)
                T.copy(a, B)
            else:
                b = T.alloc_fragment(rest, "float32")
                T.reduce_max(a, b, dim=dim) if kind == "max" else T.reduce_sum(a, b, dim=dim)
                T.copy(b, B)

    return kernel.program, rest


@pytest.mark.parametrize("threads", [33, 40, 96, 100, 160, 255, 384, 640, 1000])
def test_any_number_of_threads(threads, seed):
    """Whole numbers, on threads that fill no warp, or no power of two of warps."""
    draw = random.Random(f"{seed} {threads}")
    for kind in ("sum", "max", "scan") * 2:
        few, many = draw.randint(1, 9), draw.randint(2, 300)
        shape = draw.choice([(512,), (few, many), (many, few)])
        dim, scope = draw.randrange(len(shape)), draw.choice(["shared", "fragment"])
        program, rest = folding(threads, shape, dim, scope, kind)
        build = Build(Target("cuda", 80), sparing=draw.random() < 0.5)
        a, b = torch.randint(0, 100, shape).float(), torch.zeros(rest)
        flat = lower(program, cuda_passes(build))
        assert not interpret(flat, program, [a, b])
        assert emit_cuda(flat, build, program).text
        wanted = a.cumsum(dim) if kind == "scan" else a.amax(dim) if kind == "max" else a.sum(dim)
        assert torch.equal(b, wanted.reshape(rest)), (kind, shape, dim, scope)


@pytest.mark.parametrize("kind", ["sum", "max", "absmax"])
def test_rows_meet_in_rounds_where_shared_memory_is_short(kind):
    stmt = lowered(accumulators(2, 2, 4, 2), (64, 64), 1, 128, kind, build=Build(Target("cuda", 90), sparing=True))
    (scratch,) = (a.buffer for a in walk(stmt) if isinstance(a, Alloc) and a.buffer.scope == "shared")
    assert scratch.static_shape == (2, 16), "a row of each thread, of which there are four"

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((128, 64), "float16"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((128, 64), "float16")
            full = T.alloc_shared((51904,), "float32")  # with the operands all but 256 bytes
            s, r = T.alloc_fragment((64, 128), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(full)
            T.gemm(a, b, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
            if kind == "sum":
                T.reduce_sum(s, r, dim=1)
            elif kind == "max":
                T.reduce_max(s, r, dim=1)
            else:
                T.reduce_absmax(s, r, dim=1)
            for i in T.Parallel(64):
                C[i] = r[i] + full[i] + T.cast(a[i, 0], "float32") + T.cast(b[i, 0], "float32")

    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert [n for n in made.schedule.slow if "one row of each thread" in n.became], made.schedule
    a, b, c = torch.randn(64, 64).half(), torch.randn(128, 64).half(), torch.full((64,), 99.0)
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    v = a.double() @ b.double().T
    wanted = {"sum": v.sum(-1), "max": v.amax(-1), "absmax": v.abs().amax(-1)}[kind]
    torch.testing.assert_close(c.double(), wanted + a[:, 0].double() + b[:64, 0].double(), rtol=1e-4, atol=1e-3)


def test_registers_are_walked_by_unrolled_loops():
    layout = accumulators(4, 1, 8)
    assert [(s.dim, s.size, s.place, s.stride) for s in steps_of(layout)] == [(0, 2, 8, 2), (1, 8, 8, 4), (1, 2, 1, 1)]
    stmt = lowered(layout, (64, 64), 1, 128)
    assert all(f.kind.value == "unroll" for f in walk(stmt) if isinstance(f, For))


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        (dt.float16, dt.float16, dt.float32), (dt.float64, dt.float32, dt.float64), (dt.int8, dt.int8, dt.int32),
        (dt.int64, dt.int64, dt.int64), (dt.uint8, dt.uint8, dt.uint32), (dt.bfloat16, dt.float32, dt.float32),
    ],
    ids=str,
)  # fmt: skip
def test_sums_are_kept_wide(source, target, wanted):
    assert accumulator(source, target) == wanted


def test_sizes_are_constant():
    n = Var("n", dt.int32, "dim")
    source, target = Buffer("a", (const(4, dt.int32), n), dt.float32, "global"), tile("b", (4,), scope="shared")
    op = REDUCTIONS["sum"].build(source, target, 1)
    context = ThreadContext(Build(Target("cuda", 90)), Var("thread", dt.int32, "thread"), 128, Ranges())
    with pytest.raises(TileError) as caught:
        op.lower_cuda(context)
    assert caught.value.code == "unsupported_on_target"
