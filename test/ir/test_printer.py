# SPDX-License-Identifier: Apache-2.0
import linecache

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings, strategies as st

import torch_tile.language as T
from torch_tile import tileop
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics import lookup, names
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import (
    Address,
    Binary,
    Call,
    Const,
    Load,
    Select,
    Unary,
    Var,
    binary,
    cast,
    const,
    maximum,
    minimum,
    natural,
    select,
)  # fmt: skip
from torch_tile.ir.node import alike
from torch_tile.ir.printer import to_text
from torch_tile.ir.stmt import (
    Alloc,
    Assert,
    Block,
    Break,
    Continue,
    Do,
    For,
    If,
    Kernel,
    Let,
    LoopKind,
    Print,
    Program,
    Store,
    While,
)  # fmt: skip
from torch_tile.language.wrap_indices import wrap_indices
from torch_tile.lowering import CPU_PASSES, cuda_passes
from torch_tile.lowering.common.flatten import flatten
from torch_tile.lowering.hopper.init_mbarriers import init_mbarriers
from torch_tile.lowering.threads.allocate_shared import allocate_shared

M, N = (Var(n, dt.int32, "dim") for n in "MN")
i, j = (Var(n, dt.int32, "loop") for n in "ij")
x, h = Var("x", dt.float32), Var("h", dt.float16)
zero = const(0, dt.int32)
A = Buffer("A", (M, N), dt.float32, "global", None, "param")
tile = Buffer("tile", (const(8, dt.int32), const(4, dt.int32)), dt.float16, "shared")


def trace(text: str) -> Program:
    """The program that the printed text says."""
    name = f"<printed {len(linecache.cache)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"T": T}
    exec(compile(text, name, "exec"), scope)
    return next(f.program for f in scope.values() if isinstance(f, T.PrimFunc))


EXPRESSIONS = {
    "i + j * 2": i + j * 2,
    "(i + j) * 2": (i + j) * 2,
    "i - (j - 1)": i - (j - 1),
    "i - j - 1": i - j - 1,
    "i // (j % 3)": i // (j % 3),
    "-i * 2": -i * 2,
    "-(i * 2)": -(i * 2),
    "i * -2": i * -2,
    "~(i & 3) | j << 1": binary("|", Unary("~", i & 3), j << 1),
    "(i < 3) == (j < 3)": binary("==", i < 3, j < 3),
    "T.int32(3) < i": Binary("<", const(3, dt.int32), i),
    "i < 3 and (j > 1 or not j == 0)": binary("and", i < 3, binary("or", j > 1, Unary("not", j == 0))),
    "(not i < 3) == (j < 3)": binary("==", Unary("not", i < 3), j < 3),
    "T.ceildiv(N, 128)": (N + 127) // 128,
    "(N + 126) // 128": (N + 126) // 128,
    "x * 0.5": x * 0.5,
    "2.0 / x": 2 / x,
    "h + 0.25": h + 0.25,
    "T.cast(h, T.float32) + x": h + x,
    "T.cast(i, T.float32) / 2.0": i / 2,
    "T.max(x, 0.0)": maximum(x, 0),
    "T.min(i, 3)": minimum(i, 3),
    "T.if_then_else(i < 3, x, 0.0)": select(i < 3, x, 0),
    "T.if_then_else(i < 3, 1.0, 0.0)": select(i < 3, natural(1.0), natural(0.0)),
    "T.if_then_else(i < 3, T.float16(1.0), 0.0)": Select(i < 3, const(1, dt.float16), const(0, dt.float16)),
    "x - T.infinity(T.float32)": x - float("inf"),
    "T.max(h, -T.infinity(T.float16))": maximum(h, float("-inf")),
    'x + T.float32(float("nan"))': x + float("nan"),
    "x * -0.0": x * -0.0,
    "T.float32(1.0) + 2.0": Binary("+", natural(1.0), natural(2.0)),
    "T.int64(5)": Const(5, dt.int64),
    "5": natural(5),
    "T.exp2(x + 1.0)": Call("exp2", (x + 1.0,), dt.float32),
    "T.pow(h, 2.0)": Call("pow", (h, const(2, dt.float16)), dt.float16),
    "A[i, j + 1]": Load(A, (i, j + 1)),
    'T.call("cpu_reduce", T.address_of(A[i, 0]), N, dtype=T.float32, options=("max",))': Call(
        "cpu_reduce", (Address(A, (i, zero)), N), dt.float32, ("max",)
    ),
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expression(text):
    assert to_text(EXPRESSIONS[text]) == text


def test_regions_and_buffers():
    whole = Region(tile, tuple(Range(zero, s) for s in tile.shape))
    assert to_text(whole) == "tile"
    part = Region(A, (Range(i * 8, const(8, dt.int32)), Range(j, const(1, dt.int32), keep=False)))
    assert to_text(part) == "A[i * 8:i * 8 + 8, j]"
    assert to_text(Region(A, (Range(const(2, dt.int32), const(3, dt.int32)), Range(zero, N)))) == "A[2:5, 0:N]"
    assert to_text(A) == "A: T.Tensor((M, N), T.float32)"
    strided = Buffer("B", (M,), dt.int8, "global", (N,), "param")
    assert to_text(strided) == "B: T.StridedTensor((M,), (N,), T.int8)"


def test_names_clash_only_where_both_are_seen():
    other = Var("x", dt.float32)
    assert to_text(x + other) == "x + x_1"
    assert to_text(Var("for", dt.int32) + Var("T", dt.int32) + Var("a b", dt.int32) + Var("1", dt.int32)) == (
        "for_ + T_ + a_b + _1"
    )

    def nest(var: Var, *body) -> For:
        return For(LoopKind.SERIAL, (var,), (zero,), (N,), Block(body))

    inner, again = Var("i", dt.int32, "loop"), Var("i", dt.int32, "loop")
    store = Store(A, (i, inner), natural(0.0))
    text = to_text(Block((nest(i, nest(inner, store)), nest(again, Store(A, (again, again), natural(1.0))))))
    assert_expected_inline(text, """\
for i in T.serial(N):
    for i_1 in T.serial(N):
        A[i, i_1] = 0.0
for i in T.serial(N):
    A[i, i] = 1.0""")  # fmt: skip


def every_statement() -> Program:
    n, bx, by = Var("n", dt.int32, "param"), Var("bx", dt.int32, "block"), Var("by", dt.int32, "block")
    C = Buffer("C", (M, const(512, dt.int32)), dt.float16, "global", None, "empty")
    W = Buffer("W", (N,), dt.int64, "global", None, "workspace")
    S = Buffer("S", (M, N), dt.int8, "global", (N * 2, const(2, dt.int32)), "param")
    v = Buffer("v", (), dt.int32, "var")
    frag = Buffer("acc", tile.shape, dt.float32, "fragment")
    y, k, q = Var("y", dt.float32), Var("k", dt.int32, "loop"), Var("q", dt.int32, "loop")
    eight = const(8, dt.int32)
    fill = tileop.tile_ops()["fill"].build(frag_region := Region(frag, tuple(Range(zero, s) for s in frag.shape)), 0)
    copy = tileop.tile_ops()["copy"].build(
        Region(A, (Range(by * 8, eight), Range(k * 4, const(4, dt.int32)))),
        Region(tile, tuple(Range(zero, s) for s in tile.shape)),
        eviction_policy="evict_first",
    )
    read = Load(frag, (i, j))
    body = Block((
        Alloc(tile), Alloc(frag), Alloc(v, zero), fill,
        For(LoopKind.PIPELINED, (k,), (zero,), ((N + 3) // 4,), Block((copy,)), stages=2, order=(0, 1), stage=(0, 1)),
        For(LoopKind.PARALLEL, (i, j), (zero, zero), (eight, const(4, dt.int32)), Block((
            Let(y, read * 2),
            If(y > 0, Block((Store(frag, (i, j), Call("exp2", (y,), dt.float32)),)), Block((
                If(y < -1, Block((Store(frag, (i, j), natural(0.0)),)), Block((Store(frag, (i, j), -y),))),
            ))),
        )), independent=True),
        While(Load(v, ()) < n, Block((
            Store(v, (), Load(v, ()) + 1),
            If(Load(v, ()) == 5, Block((Continue(),)), Block(())),
            If(Load(v, ()) > 9, Block((Break(),)), Block(())),
        ))),
        For(LoopKind.UNROLLED, (q,), (const(1, dt.int32),), (n,), Block(()), step=3),
        For(LoopKind.SERIAL, (Var("q", dt.int32, "loop"),), (const(1, dt.int32),), (n,), Block(()), step=3, factor=2),
        Assert(Load(v, ()) >= 0, 'it "broke"'), Print("acc", frag_region), Print("v", Load(v, ())),
        Do(Call("atomic", (Address(C, (bx, by)), const(1, dt.float16)), dt.int32, ("add",))),
    ))  # fmt: skip
    kernel = Kernel((eight, (M + 7) // 8), (bx, by), (128,), body, (4, "row"), min_blocks=2)
    return Program("main", (A, S, n), (kernel,), (W,), (C,))


def test_every_statement():
    program = every_statement()
    assert_expected_inline(to_text(program), """\
M = T.dynamic("M")
N = T.dynamic("N")
@T.prim_func
def main(A: T.Tensor((M, N), T.float32), S: T.StridedTensor((M, N), (N * 2, 2), T.int8), n: T.int32):
    C = T.empty((M, 512), T.float16)
    W = T.alloc_global((N,), T.int64)
    with T.Kernel(8, T.ceildiv(M, 8), threads=128) as (bx, by):
        T.annotate_min_blocks_per_sm(2)
        T.use_swizzle(4, "row")
        tile = T.alloc_shared((8, 4), T.float16)
        acc = T.alloc_fragment((8, 4), T.float32)
        v = T.alloc_var(T.int32, 0)
        T.fill(acc, 0.0)
        for k in T.Pipelined(T.ceildiv(N, 4), num_stages=2, order=[0, 1], stage=[0, 1]):
            T.copy(A[by * 8:by * 8 + 8, k * 4:k * 4 + 4], tile, eviction_policy="evict_first")
        for i, j in T.Parallel(8, 4, independent=True):
            y = acc[i, j] * 2.0
            if y > 0.0:
                acc[i, j] = T.exp2(y)
            elif y < -1.0:
                acc[i, j] = 0.0
            else:
                acc[i, j] = -y
        while v < n:
            v = v + 1
            if v == 5:
                continue
            if v > 9:
                break
        for q in T.unroll(1, n, 3):
            pass
        for q in T.unroll(1, n, 3, unroll_factor=2):
            pass
        T.device_assert(v >= 0, "it \\"broke\\"")
        T.print(acc, "acc")
        T.print(v, "v")
        T.evaluate(T.call("atomic", T.address_of(C[bx, by]), T.float16(1.0), dtype=T.int32, options=("add",)))
    return C""")  # fmt: skip
    back = trace(to_text(program))
    assert alike(back, program) and to_text(back) == to_text(program)


@settings(max_examples=60)
@given(st.data())
def test_random_expressions_trace_back(random, data):
    """A kernel that stores random expressions, read back from its text."""
    bx = Var("bx", dt.int32, "block")
    lets = tuple(Let(v, cast(Load(A, (random.i, random.j)), v.dtype)) for v in (random.h,))
    lets += tuple(Let(v, Load(A, (random.i, random.j)) * 3.0) for v in (random.x, random.y))
    stores = []
    for _ in range(4):
        number = data.draw(random.floats() | random.integers())
        index = data.draw(random.integers(3))
        index = index if not isinstance(index, Const) else zero  # a literal below zero counts from the end
        store = Store(A, (index, random.j), cast(number, dt.float32))
        condition = data.draw(random.conditions())
        stores.append(store if isinstance(condition, Const) else If(condition, Block((store,)), Block(())))
    dims = Buffer("D", (random.M, random.N), dt.float32, "global", None, "param")
    nest = For(LoopKind.SERIAL, (random.j,), (random.i,), (random.i + random.N,), Block((*lets, *stores)))
    body = For(LoopKind.SERIAL, (random.i,), (zero,), (M,), Block((nest,)))
    program = Program("p", (A, dims, random.u), (Kernel((N,), (bx,), (32,), Block((body,))),), (), ())
    back = trace(to_text(program))
    assert alike(back, wrap_indices(program)), to_text(program)  # what is certainly below zero counts from the end


def test_every_tile_op_traces_back():
    """Options that differ from their defaults are printed, regions and values come first."""

    @T.prim_func
    def ops(X: T.Tensor((64, M), T.float16), out: T.Tensor((64,), T.float32)):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((64, 32), T.float16), T.alloc_shared((64, 32), T.float16)
            c, r = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64,), T.float32)
            T.copy(X[0, 0], a, disable_tma=True)
            T.copy(a[3:5, 2], b[1, 4:6])
            T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)
            T.reduce_max(c, r, dim=1, clear=False)
            T.reduce_sum(c, r, dim=0)
            T.cumsum(c, dim=1, reverse=True)
            T.atomic_add(out[0:64], r)
            T.atomic_max(out[3], 2.5)
            T.fill(a[0:3, :], 1.5)
            T.clear(b)

    text = to_text(ops.program)
    assert alike(trace(text), ops.program)
    assert "T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)" in text
    assert "T.fill(a[0:3, 0:32], 1.5)" in text and "T.copy(a[3:5, 2], b[1, 4:6])" in text


def test_every_stage_of_the_lowering_traces_back():
    @T.prim_func
    def kernel(X: T.Tensor((M, N), T.float16), Y: T.StridedTensor((M, N), (N * 2, 2), T.float32), count: T.int32):
        out = T.empty((M,), T.float32)
        with T.Kernel(T.ceildiv(M, 16), threads=32) as bx:
            x, y = T.alloc_shared((16, 32), T.float16), T.alloc_shared((32, 32), T.float16)
            acc, row = T.alloc_fragment((16, 32), T.float32), T.alloc_fragment((16,), T.float32)
            steps = T.alloc_var(T.int32, 0)
            T.clear(acc)
            T.clear(y)
            for k in T.Pipelined(T.ceildiv(N, 32), num_stages=2):
                T.copy(X[bx * 16, k * 32], x)
                T.gemm(x, y, acc, transpose_B=True)
                for i, j in T.Parallel(16, 32):
                    scaled = acc[i, j] * 0.5
                    acc[i, j] = T.if_then_else(k * 32 + j < N, scaled, -T.infinity(T.float32))
                steps += 1
                if steps > count:
                    break
            T.reduce_max(acc, row, dim=1)
            T.copy(row, out[bx * 16 : bx * 16 + 16])
            T.copy(acc, Y[bx * 16, 0])
        return out

    program = kernel.program
    for step, _ in CPU_PASSES:
        program = step(program)
        text = to_text(program)
        back = trace(text)
        assert alike(back, program), f"after {step.__name__}:\n{text}"
        assert to_text(back) == text


def test_layouts_offsets_and_threads_trace_back():
    @T.prim_func
    def kernel(A: T.Tensor((100, 64), "float16"), C: T.Tensor((100, 64), "float32")):
        with T.Kernel(2, threads=128) as bx:
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            m = T.alloc_fragment((64,), "float32")
            T.copy(A[bx * 64, 0], a)
            T.gemm(a, a, c, transpose_B=True, clear_accum=True)
            T.reduce_max(c, m, dim=1)
            for i, j in T.Parallel(64, 64):
                c[i, j] = c[i, j] - m[i]
            T.copy(c, C[bx * 64, 0])

    program = kernel.program
    texts = {}
    for step, _ in cuda_passes(Build(Target.of("cuda:sm_80"))):
        program = step(program)
        texts[step.__name__] = text = to_text(program)
        if step.__name__ in ("infer_layouts", "simplify_program", "allocate_shared", "insert_barriers", "flatten"):
            back = trace(text)
            assert alike(back, program), f"after {step.__name__}:\n{text}"
            assert to_text(back) == text
    assert 'layout="[64:64m | 64:1m] ^(3,3,3)"' in texts["infer_layouts"] and "loop_layout=" in texts["infer_layouts"]
    assert "thread = T.thread_index()" in texts["flatten"] and "shared_bytes=" in texts["flatten"]
    assert "offset=0" in texts["flatten"] and 'T.call("barrier", dtype=T.int32)' in texts["flatten"]


def test_roles_barriers_and_tensor_maps_trace_back():
    """A role is no scope of the author's, and a flat tensor's map still shows its sizes and strides."""

    @T.prim_func
    def kernel(A: T.StridedTensor((M, N), (N * 2, 1), "float16"), B: T.Tensor((64, M), "float16")):
        with T.Kernel(2, threads=160) as bx:
            thread = T.thread_index()
            full = T.alloc_barrier(1, 2)
            a = T.alloc_shared((2, 64, 64), "float16")
            with T.role(0, 128, registers=168):
                for k in T.serial(4):
                    T.evaluate(T.call("mbarrier_wait", T.address_of(full[k % 2]), k // 2 % 2))
                    B[thread % 64, k] = a[k % 2, thread % 64, bx]
            with T.role(128, 32):
                box = T.tensor_map(A, (M, N), (N * 2, 1), box=(64, 64), swizzle=128)
                for k in T.serial(4):
                    if thread == 128:
                        place = T.address_of(a[k % 2, 0, 0]), box, T.address_of(full[k % 2]), k * 64, bx * 64
                        T.evaluate(T.call("tma_load", *place, options=("evict_first",)))

    program = kernel.program
    text = to_text(program)
    assert "full = T.alloc_barrier(1, (2,))" in text and "with T.role(0, 128, registers=168):" in text
    assert "T.tensor_map(A, (M, N), (N * 2, 1), box=(64, 64), swizzle=128)" in text
    build = Build(Target.of("cuda:sm_90a"))
    for step in (lambda p: p, lambda p: allocate_shared(p, build), init_mbarriers, flatten):
        program = step(program)
        text = to_text(program)
        back = trace(text)
        assert alike(back, program), text
        assert to_text(back) == text
    assert "T.alloc_barrier(1, (2,), offset=16384)" in text and "A: T.Tensor((M * N,), T.float16)" in text


@pytest.mark.every_sample
@pytest.mark.parametrize("name", sorted(n for n in names() if lookup(n).header and not lookup(n).cpu))
def test_calls_of_threads_trace_back(name):
    """Whatever their operands are: the intrinsics of GPU threads are no functions of the language."""
    place = Address(tile, (zero, zero))
    for operands in ((place, i, const(7, dt.uint32)), (const(2.0, dt.float32), const(2, dt.int32), i)):
        call = Call(name, operands[: lookup(name).arity], dt.float32)
        loop = For(LoopKind.SERIAL, (i,), (zero,), (const(3, dt.int32),), Block((Do(call),)))
        block = Var("bx", dt.int32, "block")
        kernel = Kernel((const(1, dt.int32),), (block,), (32,), Block((Alloc(tile), loop)))
        program = Program("k", (), (kernel,), (), ())
        assert alike(trace(to_text(program)), program), to_text(program)
