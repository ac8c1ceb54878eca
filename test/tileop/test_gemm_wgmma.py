# SPDX-License-Identifier: Apache-2.0
"""Products by wgmma: what an instruction reads through its descriptor is the operand; refusals; what threads do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from expecttest import assert_expected_inline

from torch_tile.build import PassOptions
from torch_tile.intrinsics.wgmma import allowed_n, walks_of
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType
from torch_tile.ir.evaluate import evaluate
from torch_tile.ir.layout import Layout, row_major, shared_tile
from torch_tile.ir.simplify_stmt import simplify_stmt
from torch_tile.tileop import gemm_mma, gemm_wgmma
from torch_tile.tileop.gemm import Gemm, GemmWarpPolicy

sys.path.insert(0, str(Path(__file__).parent))

from hopper_model import Operand, calls, place_of

H, B, F, I8, U8, I32, E4, E5 = (
    dt.float16, dt.bfloat16, dt.float32, dt.int8, dt.uint8, dt.int32, dt.float8_e4m3fn, dt.float8_e5m2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One product; `k_slice`, `m_slice` and `n_slice` take the second half of that dimension of larger tiles."""

    m: int = 64
    n: int = 64
    k: int = 64
    types: tuple[DType, DType, DType] = (H, H, F)
    turned: tuple[bool, bool] = (False, True)
    threads: int = 128
    policy: str = "Square"
    a_scope: str = "shared"
    versions: int = 0
    k_slice: bool = False
    m_slice: bool = False
    n_slice: bool = False
    clear: bool = False
    wait: int = 0
    layouts: tuple[Layout | None, Layout | None] = (None, None)
    scopes: tuple[str, str] = ("shared", "fragment")  # of B and C

    def buffers(self, on_threads) -> list[Buffer]:
        """A, B and C; those in shared memory with the layouts of the case."""
        m, n, k = self.m * (1 + self.m_slice), self.n * (1 + self.n_slice), self.k * (1 + self.k_slice)
        shapes = (k, m) if self.turned[0] else (m, k), (n, k) if self.turned[1] else (k, n), (self.m, self.n)
        scopes, layouts = (self.a_scope, *self.scopes), (*self.layouts, None)
        made = []
        for name, shape, scope, dtype, layout in zip("ABC", shapes, scopes, self.types, layouts, strict=True):
            lead = (self.versions,) if self.versions and scope == "shared" else ()
            made.append(on_threads.buffer(name, lead + shape, dtype, scope, layout))
        return made

    def op(self, on_threads, buffers) -> Gemm:
        """The product; of several versions, number 1 of each."""
        second = (self.k, self.k) if self.k_slice else None
        rows, columns = ((x, x) if s else None for x, s in ((self.m, self.m_slice), (self.n, self.n_slice)))
        a, b, c = buffers
        ranges = [(second, rows) if self.turned[0] else (rows, second)]
        ranges += [(columns, second) if self.turned[1] else (second, columns)]
        boxes = [on_threads.box(x, *[(1, 1)] * (x.rank - 2), *r) for x, r in zip((a, b), ranges, strict=True)]
        policy = GemmWarpPolicy(self.policy)
        return Gemm(*boxes, on_threads.box(c), *self.turned, policy, self.clear, self.wait)


@pytest.fixture
def prepared(on_threads):
    """`prepared(case, **options)`: the product on laid out buffers, and the threads."""

    def prepare(case: Case, target: str = "sm_90a", **options: bool):
        run = on_threads(case.threads, target, **options)
        run.ctx = dataclasses.replace(run.ctx, asynchronous=True)
        make = functools.partial(case.op, on_threads)
        assert gemm_wgmma.refuses(make(case.buffers(on_threads)), run.ctx) is None
        return make(run.laid_out(make, case.buffers(on_threads))), run

    return prepare


@pytest.fixture
def refusal(on_threads):
    """`refusal(case, **options)`: why the product does not go by wgmma."""

    def refuse(case: Case, target: str = "sm_90a", **options: bool) -> str | None:
        run = on_threads(case.threads, target, **options)
        ctx = dataclasses.replace(run.ctx, asynchronous=True)
        return gemm_wgmma.refuses(case.op(on_threads, case.buffers(on_threads)), ctx)

    return refuse


# What the instruction reads.


def expected(region: Region, turned: bool, rows: int, k: int, i: int, j: int) -> np.ndarray:
    """Indices of the operand's elements from row (column of B) `i` and step `j` on, `[rows, k, rank]`."""
    starts = [int(evaluate(s, {})) for s in region.starts]
    found = np.zeros((rows, k, len(starts)), int)
    found += starts
    row, column = (-1, -2) if turned else (-2, -1)
    found[..., row] += i + np.arange(rows)[:, None]
    found[..., column] += j + np.arange(k)[None, :]
    return found


def check_operands(op: Gemm, run, case: Case) -> list[tuple[str, int]]:
    """Each warpgroup multiplies the rows of A and columns of B that its accumulators stand for; gives (name, n)."""
    layout = op.C.buffer.layout
    step = 256 // case.types[0].bits
    shapes: list[tuple[str, int]] = []
    for group in range(case.threads // 128):
        seen: set[tuple[int, int, int]] = set()
        for name, args, call in calls(op.lower_cuda(run.ctx), {run.thread: 128 * group}):
            if name != "wgmma":
                continue
            (_, (first,)), (a, a_at), (b, b_at), a_step, b_step, keep = args
            n = int(str(call.options[0]))
            i, j = (int(x) for x in place_of(layout, 128 * group, first))
            inner = next(k for k in itertools.count(0, step) if (i, j, k) not in seen)
            seen.add((i, j, inner))
            assert keep == (not (case.clear and inner == 0 and case.k > step))
            a_walk, b_walk = walks_of(call)
            if a_walk is None:
                t, v = place_of(op.A.buffer.layout, 128 * group, a_at[0])
                assert (t, v) == (i, inner)
            else:
                memory = Operand.holding(a)
                got = memory.matrix(memory.start(a_at) + a_step, a_walk, 64, step)
                np.testing.assert_array_equal(got, expected(op.A, op.transpose_A, 64, step, i, inner))
            memory = Operand.holding(b)
            got = memory.matrix(memory.start(b_at) + b_step, b_walk, n, step)
            np.testing.assert_array_equal(got, expected(op.B, not op.transpose_B, n, step, j, inner))
            assert allowed_n(n, case.types[0].name)
            shapes.append((call.name, n))
        steps = case.k // step
        assert len(seen) % steps == 0
        p = op.C.buffer.layout.extent("r")
        assert len(seen) // steps * 32 * shapes[-1][1] // 64 == p  # every accumulator gets its product
    return shapes


ALONG_K = [
    Case(),
    Case(k=128),
    Case(m=64, n=16, k=576),
    Case(k=32),
    Case(k=16),
    Case(m=192, n=40),
    Case(m=128, n=512, k=16),
    Case(m=256, n=256, threads=256),
    Case(m=128, n=64, threads=256, policy="FullCol"),
    Case(m=64, n=512, k=64, threads=256, policy="FullCol"),
    Case(m=64, n=8, threads=256),
    Case(versions=3),
    Case(versions=3, k_slice=True, k=32),
    Case(m_slice=True, n_slice=True, k_slice=True),
    Case(m=64, n=24, k=96, n_slice=True),
    Case(types=(B, B, F)),
    Case(types=(H, H, H)),
    Case(types=(E4, E5, F), k=128),
    Case(types=(E5, E4, F), k=192, n=72),
    Case(types=(E4, E4, F), k=32),
    Case(types=(I8, U8, I32), k=256, n=144),
    Case(types=(F, F, F), k=32),
    Case(types=(F, F, F), k=8),
    Case(types=(F, F, F), k=96, versions=2, m=128),
    Case(layouts=(shared_tile((64, 64), 16, 32), shared_tile((64, 64), 16, 64))),
]


@pytest.mark.parametrize("case", ALONG_K, ids=str)
def test_operands_along_k(prepared, case: Case) -> None:
    op, run = prepared(case, tf32=case.types[0] is F)
    check_operands(op, run, case)


ACROSS = [
    Case(turned=(False, False)),
    Case(turned=(True, True)),
    Case(turned=(True, False), types=(B, B, F), k=128),
    Case(turned=(True, False), m=128, n=256, k=48, threads=256),
    Case(turned=(False, False), n=32),
    Case(turned=(False, False), n=16, k=80),
    Case(turned=(False, False), n=192, k=32),
    Case(turned=(False, False), m=64, n=512, k=32, threads=256, policy="FullCol"),
    Case(turned=(True, False), versions=2, m_slice=True, n_slice=True, k_slice=True),
    Case(turned=(True, False), types=(H, H, H), m=192),
    Case(turned=(True, False), layouts=(shared_tile((64, 64), 16, 32), shared_tile((64, 64), 16, 64))),
]


@pytest.mark.parametrize("case", ACROSS, ids=str)
def test_operands_across_k(prepared, case: Case) -> None:
    op, run = prepared(case)
    check_operands(op, run, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(a_scope="fragment"),
        Case(a_scope="fragment", m=256, n=128, k=128, threads=256, turned=(False, False)),
        Case(a_scope="fragment", m=64, n=128, k=32, threads=256, policy="FullCol"),
        Case(a_scope="fragment", types=(E4, E4, F), m=128, k=64),
        Case(a_scope="fragment", types=(I8, I8, I32), k=96),
        Case(a_scope="fragment", clear=True, versions=2),
    ],
    ids=str,
)
def test_the_left_operand_in_registers(prepared, case: Case) -> None:
    op, run = prepared(case)
    check_operands(op, run, case)


def test_two_products_in_a_row_agree_about_registers(prepared) -> None:
    """The accumulators of S = Q K^T, cast, are the left operand of P V."""
    one, _ = prepared(Case(m=128, n=64, threads=256, policy="FullRow"))
    two, _ = prepared(Case(m=128, n=128, k=64, threads=256, a_scope="fragment", turned=(False, False)))
    assert one.C.buffer.layout == two.A.buffer.layout


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_cleared_accumulators(prepared, steps: int) -> None:
    """The first step overwrites; a single one is not told so (its flag would be a literal), but finds zeros."""
    case = Case(n=16, k=16 * steps, clear=True)
    op, run = prepared(case)
    check_operands(op, run, case)
    stores = [args for name, args, _ in calls(op.lower_cuda(run.ctx), {run.thread: 0}) if name == "store"]
    assert [(at, value) for _, at, value in stores] == ([((v,), 0.0) for v in range(8)] if steps == 1 else [])


def order(op: Gemm, run) -> str:
    """The names of the calls."""
    return " ".join(name.removeprefix("wgmma_") for name, *_ in calls(op.lower_cuda(run.ctx), {run.thread: 0}))


def test_the_order_of_one_group(prepared) -> None:
    assert order(*prepared(Case(k=32))) == "fence wgmma wgmma commit wait"
    assert order(*prepared(Case(k=32, m=128, n=512))) == "fence" + 8 * " wgmma" + " commit wait"
    assert order(*prepared(Case(k=16, wait=-1))) == "fence wgmma commit"
    op, run = prepared(Case(k=16, wait=1))
    *_, (name, _, call) = calls(op.lower_cuda(run.ctx), {run.thread: 0})
    assert (name, call.options) == ("wgmma_wait", (1,))


def test_what_a_thread_does(prepared) -> None:
    op, run = prepared(Case(m=128, n=128, k=128, turned=(False, False), threads=256, versions=2))
    text = repr(simplify_stmt(op.lower_cuda(run.ctx), run.ctx.ranges))
    for place in (", T.address_of(B", ", ks // ", ", dtype=T.int32, options="):
        text = text.replace(place, ",\n       " + place.removeprefix(",").replace("dtype=T.int32, ", ""))
    assert_expected_inline(
        text,
        """\
T.evaluate(T.call("wgmma_fence", dtype=T.int32))
for ks in T.unroll(8):
    T.evaluate(T.call("wgmma", T.address_of(C[0]), T.address_of(A[1, 0, 0]),
        T.address_of(B[1, 0, 0]),
        ks // 4 * 16384 + ks * 16 % 64 * 2 + t // 128 * 8192, ks * 2048, True,
        options=(128, "float16", "float16", "float32", (128, 16, 1024, False), (128, 16384, 1024, True))))
T.evaluate(T.call("wgmma_commit", dtype=T.int32))
T.evaluate(T.call("wgmma_wait",
        options=(0,)))""",
    )
    (note,) = run.ctx.build.notes
    assert note.became == (
        "wgmma m64n128k16 float16, 2 x 1 warpgroups of 64 x 128; A: shared panels of 128 bytes; "
        "B: shared panels of 128 bytes across K"
    )


# Refusals.

PADDED = Layout.parse("[64:72m | 64:1m]")
NO_PANELS = "`{}` does not lie in panels of 32, 64 or 128 bytes that swizzles repeat in"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(types=(B, B, B)), "no wgmma on cuda:sm_90a multiplies bfloat16 by bfloat16 into bfloat16"),
        (Case(types=(H, B, F)), "no wgmma on cuda:sm_90a multiplies float16 by bfloat16 into float32"),
        (Case(types=(F, F, F)), "no wgmma on cuda:sm_90a multiplies float32 by float32 into float32"),
        (Case(types=(E4, E4, H)), "no wgmma on cuda:sm_90a multiplies float8_e4m3fn by float8_e4m3fn into float16"),
        (Case(threads=96), "96 threads are not whole warpgroups"),
        (Case(k=24), "K = 24 is not a multiple of 16"),
        (Case(types=(I8, I8, I32), k=48), "K = 48 is not a multiple of 32"),
        (Case(scopes=("shared", "shared")), "`C` is no whole fragment"),
        (Case(scopes=("fragment", "fragment")), "`B` is in fragment memory, and wgmma reads B from shared memory"),
        (Case(a_scope="fragment", turned=(True, True)), "`A` in registers is transposed, or a slice"),
        (Case(a_scope="fragment", k_slice=True), "`A` in registers is transposed, or a slice"),
        (Case(a_scope="local"), "`A` is in local memory"),
        (Case(types=(E4, E4, F), turned=(False, False)), "`B` runs across K, and wgmma turns only 16-bit elements"),
        (Case(types=(I8, I8, I32), turned=(True, True)), "`A` runs across K, and wgmma turns only 16-bit elements"),
        (Case(layouts=(None, PADDED)), NO_PANELS.format("B")),
        (Case(layouts=(row_major((64, 64)), None)), NO_PANELS.format("A")),
        (Case(turned=(False, False), n=8), NO_PANELS.format("B")),
        (Case(n=20, n_slice=True), "the slice of `B` may not start at a multiple of 8 x 16"),
        (Case(n=48, n_slice=True, turned=(False, False)), "the slice of `B` may not start at a multiple of 16 x 32"),
        (Case(m=96), "96 x 64 is not shared by 1 warpgroups"),
        (Case(n=12), "64 x 12 is not shared by 1 warpgroups"),
        (Case(m=32, threads=256), "32 x 64 is not shared by 2 warpgroups"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_refusals(refusal, case: Case, why: str) -> None:
    assert refusal(case) == why


def test_without_a_warp_that_copies_products_go_by_mma_sync(on_threads) -> None:
    run, case = on_threads(128, "sm_90a"), Case()
    op = case.op(on_threads, case.buffers(on_threads))
    assert gemm_wgmma.refuses(op, run.ctx) == gemm_wgmma.NO_BULK_COPIES
    assert op.carrier(run.ctx) == (gemm_mma, [gemm_wgmma.NO_BULK_COPIES])


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120a"])
def test_only_hopper_has_it(refusal, target: str) -> None:
    assert target in refusal(Case(), target)


def test_tf32_is_the_authors_choice(refusal) -> None:
    case = Case(types=(F, F, F), k=32)
    assert refusal(case, tf32=True) is None
    assert refusal(dataclasses.replace(case, a_scope="fragment"), tf32=True) == (
        "`A` in registers would have to be rounded to tf32"
    )
    assert PassOptions().tf32 is False
