# SPDX-License-Identifier: Apache-2.0
"""Epilogues fused into shared tiles that leave by bulk copies: texts, values, order, and tiles that take none."""

import random

import pytest
import torch
from emulate import emulate
from expecttest import assert_expected_inline
from mutation import removals

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.dtype import to_dtype
from torch_tile.kernels.epilogue.fuse_into_stores import fuse_into_stores, tiles_that_leave
from torch_tile.kernels.epilogue.program import evaluate, parse
from torch_tile.lowering import cuda_passes, lower
from torch_tile.ops.own_kernel import with_epilogue
from torch_tile.simulator.interpret import interpret

HOPPER = Target.of("cuda:sm_90a")
BF16, F32 = torch.bfloat16, torch.float32


def product(form, m, n, k, dtype="bfloat16"):
    """C = A @ B, whose tiles leave through shared memory in the ways that authors write."""
    tiles = -(-m // 64) * -(-n // 64)

    @T.macro
    def one(tile, tensors, a, b, s, c):
        A, B, C = tensors
        row, col = tile // T.ceildiv(n, 64) * 64, tile % T.ceildiv(n, 64) * 64
        T.clear(c)
        for i in T.Pipelined(T.ceildiv(k, 32), num_stages=2):
            T.copy(A[row, i * 32], a)
            T.copy(B[i * 32, col], b)
            T.gemm(a, b, c)
        if form == "panels":
            for panel in T.unroll(2):
                T.copy(c[:, panel * 32 : panel * 32 + 32], s)
                T.copy(s, C[row, col + panel * 32])
        else:
            T.copy(c, s)
            T.copy(s, C[row, col])

    @T.prim_func
    def kernel(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(2 if form == "tile after tile" else tiles, threads=128) as block:
            a, b = T.alloc_shared((64, 32), dtype), T.alloc_shared((32, 64), dtype)
            s, c = T.alloc_shared((64, 32 if form == "panels" else 64), dtype), T.alloc_fragment((64, 64), "float32")
            if form == "layout":
                T.annotate_layout({s: T.make_swizzled_layout(s)})
            if form == "tile after tile":
                for step in T.serial(T.ceildiv(tiles - block, 2)):
                    one(block + step * 2, (A, B, C), a, b, s, c)
            else:
                one(block, (A, B, C), a, b, s, c)

    return kernel


FORMS = ["one tile", "panels", "tile after tile", "layout"]
# Kinds and types of the operands, the text, and what waits for no tile: the residual comes through the tile.
EPILOGUES = {
    "residual": ("rt", (F32, BF16), "v0=add(acc0,x0);v1=relu(v0);v2=add(v1,x1);ret v2"),
    "two residuals": ("tt", (BF16, BF16), "v0=mul(acc0,x0);v1=add(v0,x1);ret v1"),
    "residual of another type": ("tc", (F32, BF16), "v0=mul(acc0,x1);v1=add(v0,x0);ret v1"),
    "no residual": ("sr", (F32, BF16), "v0=mul(acc0,x0);v1=sub(v0,x1);ret v1"),
}


def operands(kinds, dtypes, m, n):
    shapes = {"t": (m, n), "r": (n,), "c": (m, 1), "s": ()}
    return [torch.randn(shapes[kind], dtype=dtype) for kind, dtype in zip(kinds, dtypes, strict=True)]


def check(got, a, b, aux, text):
    """Against float64; the product is rounded to bfloat16 before, or to its neighbour."""
    want = evaluate(text, [(a.double() @ b.double()).bfloat16().double()], [x.double() for x in aux])
    largest = 1 + max(float(x.abs().max()) for x in aux)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * largest)


@pytest.mark.parametrize("engine", ["cpu", "cuda:sm_80", "cuda:sm_90a", "text"])
@pytest.mark.parametrize("form", FORMS)
def test_values(form, engine, seed):
    torch.manual_seed(seed)
    choose = random.Random(seed)
    m, n, k = 8 * choose.randint(1, 20), 8 * choose.randint(1, 20), 8 * choose.randint(1, 12)
    kinds, dtypes, text = EPILOGUES[choose.choice(list(EPILOGUES))]
    kernel = torch_tile.compile(
        product(form, m, n, k), out_idx=[-1], target="cuda:sm_90a" if engine == "text" else engine
    )
    fused = with_epilogue(kernel, kinds, text, dtypes, BF16)
    a, b, aux = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16() / k**0.5, operands(kinds, dtypes, m, n)
    if engine == "cpu":
        got = fused(a, b, *aux)
    elif engine == "text":
        got = emulate(fused, a, b, *aux, seed=seed)
    else:
        findings = fused.interpret(a, b, *aux)
        assert not findings, findings
        (got,) = findings.outputs
    check(got, a, b, aux, text)


@pytest.mark.parametrize("form", FORMS)
def test_tiles_leave_and_residuals_come_by_bulk_copies(form):
    kernel = torch_tile.compile(product(form, 128, 128, 64), out_idx=[-1], target="cuda:sm_90a")
    fused = with_epilogue(kernel, "rt", EPILOGUES["residual"][2], (F32, BF16), BF16)
    plain, text = (each.get_kernel_source().partition('extern "C" __global__')[2] for each in (kernel, fused))
    assert text.count("tma_store(&C_map") == plain.count("tma_store(&C_map") > 0
    assert text.count("stmatrix") >= plain.count("stmatrix")
    assert ("tma_load(s" in text) == (form in ("one tile", "layout"))  # else threads copy it, in pieces of 16 bytes


@pytest.mark.parametrize("form", ["one tile", "tile after tile"])
def test_all_that_orders_the_tile_is_needed(form):
    """The residual's copy, the epilogue, and the copy of its values use one tile one after the other."""
    m, n, k = 192, 64, 160
    program = product(form, m, n, k).program
    kinds, dtypes, text = EPILOGUES["residual"]
    given = [(kind, to_dtype(dtype)) for kind, dtype in zip(kinds, dtypes, strict=True)]
    fused = fuse_into_stores(program, program.params[2], parse(text), given, to_dtype(BF16))
    flat = lower(fused, cuda_passes(Build(HOPPER)))
    aux = operands(kinds, dtypes, m, n)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16() / k**0.5
    args = [a, b, torch.full((m, n), float("nan")).bfloat16(), *aux]
    findings = interpret(flat, fused, args)
    assert not findings, findings.report()
    check(args[2], a, b, aux, text)
    missed = [r for r in removals(flat) if not interpret(r.program, fused, [x.clone() for x in args])]
    wrong = [f"{r.name} {r.number} at {r.span}" for r in missed if not r.name.startswith(MAY_STAY)]
    if form == "tile after tile":  # threads copy the residual, and values replace it before a bulk copy reads the tile
        assert [text.split()[0] for text in wrong] == ["fence_proxy_async"]
    else:
        assert not wrong, f"without {wrong}: nothing found"


# What lets the last stages of a loop go lets them go for nobody, and two waits for products in order are one.
MAY_STAY = ("mbarrier_arrive", "warp_arrive", "wgmma_fence", "wgmma_wait")


def doubled(form):
    """A tile of 16 x 32 doubled, which leaves through shared memory, or seems to."""
    dtype = "bfloat16" if form == "another type" else "float32"

    @T.prim_func
    def two(A: T.Tensor((48, 32), "float32"), C: T.Tensor((48, 32), "float32")):
        with T.Kernel(3, threads=64) as b:
            t = T.alloc_fragment((16, 32), "float32")
            s = T.alloc_shared((16, 32), dtype)
            T.copy(A[b * 16, 0], t)
            for i, j in T.Parallel(16, 32):
                t[i, j] = t[i, j] * 2
            if form == "in two parts":
                T.copy(t[0:8, :], s[0:8, :])
                T.copy(t[8:16, :], s[8:16, :])
                T.copy(s, C[b * 16, 0])
            elif form == "read once more":
                T.copy(t, s)
                T.copy(s, C[b * 16, 0])
                T.copy(s, t)
            elif form == "left in two parts":
                T.copy(t, s)
                T.copy(s[0:8, :], C[b * 16, 0])
                T.copy(s[8:16, :], C[b * 16 + 8, 0])
            elif form == "filled before a loop":
                T.copy(t, s)
                for _ in T.serial(2):
                    T.copy(s, C[b * 16, 0])
            elif form == "a place of memory":
                place = T.alloc_var("int32")
                place = b * 16
                T.copy(t, s)
                place = 32 - b * 16
                T.copy(s, C[place, 0])
            else:
                T.copy(t, s)
                T.copy(s, C[b * 16, 0])

    return two


OTHERS = [
    "in two parts", "read once more", "left in two parts", "filled before a loop", "a place of memory", "another type",
]  # fmt: skip


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
@pytest.mark.parametrize("form", ["whole", *OTHERS])
def test_other_tiles_take_no_epilogue(form, target):
    made = doubled(form)
    leaving = tiles_that_leave(made.program, made.program.params[1], to_dtype(F32))
    assert len(leaving) == (form == "whole")
    kernel = torch_tile.compile(made, out_idx=[-1], target=target)
    text = "v0=add(acc0,x0);ret v0"
    fused = with_epilogue(kernel, "t", text, (F32,), F32)
    x, more = torch.randn(48, 32), torch.randn(48, 32)
    if target == "cpu":
        got = fused(x, more)
    else:
        findings = fused.interpret(x, more)
        assert not findings, findings
        (got,) = findings.outputs
    want = 2 * (x.view(3, 16, 32).flip(0).reshape(48, 32) if form == "a place of memory" else x)
    want = (want.bfloat16().float() if form == "another type" else want) + more
    torch.testing.assert_close(got, want)


def test_what_a_tile_becomes():
    made = doubled("whole")
    result = made.program.params[1]
    given = [("t", to_dtype(F32)), ("r", to_dtype(F32))]
    epilogue = parse("v0=mul(acc0,x1);v1=add(v0,x0);ret v1")
    assert_expected_inline(
        body(made.program),
        """\
        t = T.alloc_fragment((16, 32), T.float32)
        s = T.alloc_shared((16, 32), T.float32)
        T.copy(A[b * 16:b * 16 + 16, 0:32], t)
        for i, j in T.Parallel(16, 32):
            t[i, j] = t[i, j] * 2.0
        T.copy(t, s)
        T.copy(s, C[b * 16:b * 16 + 16, 0:32])""",
    )
    assert_expected_inline(
        body(fuse_into_stores(made.program, result, epilogue, given, to_dtype(F32))),
        """\
        t = T.alloc_fragment((16, 32), T.float32)
        s = T.alloc_shared((16, 32), T.float32)
        T.copy(A[b * 16:b * 16 + 16, 0:32], t)
        for i, j in T.Parallel(16, 32):
            t[i, j] = t[i, j] * 2.0
        values = T.alloc_fragment((16, 32), T.float32)
        T.copy(operand_0[b * 16:b * 16 + 16, 0:32], s)
        for i, j in T.Parallel(16, 32):
            values_1 = t[0 + i, 0 + j]
            values_2 = s[0 + i, 0 + j]
            values_3 = operand_1[0 + j]
            value = values_1 * values_3
            value_1 = value + values_2
            values[0 + i, 0 + j] = value_1
        T.copy(values, s)
        T.copy(s, C[b * 16:b * 16 + 16, 0:32])""",
    )


def body(program):
    return repr(program).partition("as b:\n")[2]
