# SPDX-License-Identifier: Apache-2.0
"""Products by wgmma: what an instruction reads through its descriptor is the operand; refusals; what threads do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from torch_tile.compiler.context import PassOptions
from torch_tile.intrinsics.bulk import fence_proxy_async
from torch_tile.intrinsics.memory import barrier
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.ir.layout import Layout, row_major, shared_tile
from torch_tile.ir.simplify import simplify_stmt
from torch_tile.ir.stmt import Block
from torch_tile.tileop.gemm import mma, wgmma
from torch_tile.tileop.gemm.op import Gemm, GemmWarpPolicy

sys.path.insert(0, str(Path(__file__).parents[1]))

from hopper_model import calls, check_operands

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
        assert wgmma.refuses(make(case.buffers(on_threads)), run.ctx) is None
        return make(run.laid_out(make, case.buffers(on_threads))), run

    return prepare


@pytest.fixture
def refusal(on_threads):
    """`refusal(case, **options)`: why the product does not go by wgmma."""

    def refuse(case: Case, target: str = "sm_90a", **options: bool) -> str | None:
        run = on_threads(case.threads, target, **options)
        ctx = dataclasses.replace(run.ctx, asynchronous=True)
        return wgmma.refuses(case.op(on_threads, case.buffers(on_threads)), ctx)

    return refuse


# What the instruction reads.


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
    assert order(*prepared(Case(k=32))) == "fence wgmma wgmma commit wait results"
    assert order(*prepared(Case(k=32, m=128, n=512))) == "fence" + 8 * " wgmma" + " commit wait results"
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
        options=(0,)))
T.evaluate(T.call("wgmma_results", T.address_of(C[0]),
        options=(64,)))""",
    )
    (note,) = run.ctx.build.remarks
    assert note.became == (
        "wgmma m64n128k16 float16, 2 x 1 warpgroups of 64 x 128; A: shared panels of 128 bytes; "
        "B: shared panels of 128 bytes across K"
    )


# What is computed.


@pytest.fixture
def check(prepared):
    """`check(case)` runs the product in the thread interpreter; operands are small integers, so it is exact."""

    def run_and_compare(case: Case) -> None:
        op, run = prepared(case, tf32=case.types[0] is F)
        buffers = [op.A.buffer, op.B.buffer, op.C.buffer]
        low = 0 if U8 in case.types else -3
        tensors = [torch.randint(low, 4, b.static_shape).to(b.dtype.as_torch()) for b in buffers]
        shown = Block((fence_proxy_async(), barrier(), op.lower_cuda(run.ctx)))
        after, findings = run.run(shown, buffers, tensors)
        assert not findings, findings.report()
        a, b, c = (x.double() for x in tensors)
        a, b = (x[1] if x.dim() == 3 else x for x in (a, b))
        a, b = a.T if case.turned[0] else a, b if case.turned[1] else b.T
        second = [
            slice(n if s else 0, None)
            for n, s in ((case.m, case.m_slice), (case.n, case.n_slice), (case.k, case.k_slice))
        ]
        product = a[second[0], second[2]] @ b[second[1], second[2]].T
        torch.testing.assert_close(after[2].double(), product + (0 if case.clear else c), rtol=0, atol=0)

    return run_and_compare


TYPES = [(H, H, F), (B, B, F), (H, H, H), (E4, E4, F), (E5, E4, F), (I8, I8, I32), (U8, I8, I32), (F, F, F)]


@pytest.mark.parametrize("types", TYPES, ids=lambda t: "_".join(map(str, t)))
@pytest.mark.parametrize("turned", list(itertools.product([False, True], repeat=2)), ids=str)
def test_types_and_transposes(check, types, turned, seed: int) -> None:
    rng = random.Random(seed)
    turned = turned if types[0].bits == 16 else (False, True)
    step = 256 // types[0].bits
    case = Case(
        64 * rng.choice([1, 2]), 32 * rng.choice([1, 2, 3]), step * rng.choice([1, 2, 3, 8]), types, turned,
        threads=128 * rng.choice([1, 2]), policy=rng.choice(["Square", "FullRow", "FullCol"]), clear=rng.random() < 0.3,
    )  # fmt: skip
    print(case)
    check(case)


@pytest.mark.parametrize(
    "types", [(H, H, F), (B, B, F), (E4, E5, F), (I8, I8, I32)], ids=lambda t: "_".join(map(str, t))
)
def test_the_left_operand_stays_in_registers(check, types, seed: int) -> None:
    rng = random.Random(seed)
    check(Case(64 * rng.choice([1, 2]), 24, 32 * rng.choice([1, 2, 3]), types, a_scope="fragment"))


@pytest.mark.parametrize("versions", [0, 3])
def test_slices(check, versions: int, seed: int) -> None:
    turned = random.Random(seed).choice([(False, True), (True, False), (True, True), (False, False)])
    check(Case(64, 64, 64, turned=turned, versions=versions, m_slice=True, n_slice=True, k_slice=True))


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
    assert wgmma.refuses(op, run.ctx) == wgmma.NO_BULK_COPIES
    assert op.implementation(run.ctx) == (mma, [wgmma.NO_BULK_COPIES])


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
