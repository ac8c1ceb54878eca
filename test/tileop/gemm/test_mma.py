# SPDX-License-Identifier: Apache-2.0
"""Products by mma.sync in the thread interpreter: every type, transposes, slices, fragments as operands."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import pytest
import torch

from torch_tile.ir import dtype as dt
from torch_tile.ir.dtype import DType
from torch_tile.tileop.gemm import mma
from torch_tile.tileop.gemm.op import Gemm, GemmWarpPolicy

H, B, F, I8, I32, F8, D = (
    dt.float16, dt.bfloat16, dt.float32, dt.int8, dt.int32, dt.float8_e4m3fn, dt.float64,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One product; `k_slice` multiplies the second half of K, `n_slice` writes the second half of N."""

    m: int
    n: int
    k: int
    types: tuple[DType, DType, DType]
    turned: tuple[bool, bool] = (False, True)
    threads: int = 128
    policy: str = "Square"
    fragments: str = ""
    versions: int = 0
    k_slice: bool = False
    n_slice: bool = False
    clear: bool = False

    def buffers(self, on_threads):
        """A, B and C without layouts."""
        k, n = self.k * (1 + self.k_slice), self.n * (1 + self.n_slice)
        shapes = {
            "A": (k, self.m) if self.turned[0] else (self.m, k), "B": (self.n, k) if self.turned[1] else (k, self.n),
        }  # fmt: skip
        made = []
        for name, shape in shapes.items():
            fragment = name in self.fragments
            lead = (self.versions,) if self.versions and not fragment else ()
            made.append(
                on_threads.buffer(name, lead + shape, self.types[len(made)], "fragment" if fragment else "shared")
            )
        return [*made, on_threads.buffer("C", (self.m, n), self.types[2], "fragment")]

    def op(self, on_threads, buffers):
        """The product on these buffers."""
        regions = []
        for of, along in zip(buffers[:2], (not self.turned[0], self.turned[1]), strict=True):
            ranges = [None, (self.k, self.k)] if along else [(self.k, self.k), None]
            ranges = ranges if self.k_slice else []
            regions.append(on_threads.box(of, *([(1, 1)] if of.rank == 3 else []), *ranges))
        c = on_threads.box(buffers[2], None, (self.n, self.n)) if self.n_slice else on_threads.box(buffers[2])
        return Gemm(*regions, c, *self.turned, GemmWarpPolicy(self.policy), self.clear)

    def expected(self, a, b, c):
        """In float64."""
        a, b = (x[1] if x.dim() == 3 else x for x in (a.double(), b.double()))
        a, b = a.T if self.turned[0] else a, b.T if self.turned[1] else b
        if self.k_slice:
            a, b = a[:, self.k :], b[self.k :]
        result = c.double().clone()
        place = result[:, -self.n :]
        place.copy_(a @ b + (0 if self.clear else place))
        return result


@pytest.fixture
def check(on_threads):
    """`check(case, **options)` lowers, runs and compares exactly, as the operands are small integers."""
    return lambda case, **options: _check(on_threads, case, **options)


def _check(on_threads, case: Case, **options: bool):
    run = on_threads(case.threads, **options)
    op = functools.partial(case.op, on_threads)
    assert mma.refuses(op(case.buffers(on_threads)), run.ctx) is None
    buffers = run.laid_out(op, case.buffers(on_threads))
    tensors = [torch.randint(-3, 4, b.static_shape).to(b.dtype.as_torch()) for b in buffers]
    after, findings = run.run(op(buffers).lower_cuda(run.ctx), buffers, tensors)
    assert not findings, findings.report()
    loads = [banks for (_, what), banks in findings.banks.items() if "ldmatrix" in what]
    assert all(banks.ways == 1 for banks in loads), findings.report()
    torch.testing.assert_close(after[2].double(), case.expected(*tensors), rtol=0, atol=0)
    return run


TURNS = list(itertools.product([False, True], repeat=2))
TYPES = [(H, H, F), (B, B, F), (H, H, H), (I8, I8, I32), (F8, F8, F), (D, D, D), (H, F8, F), (B, F8, F)]


@pytest.mark.parametrize("types", TYPES, ids=lambda t: "_".join(map(str, t)))
@pytest.mark.parametrize("turned", TURNS, ids=str)
def test_types_and_transposes(check, types, turned, seed: int) -> None:
    rng = random.Random(seed)
    m, n, k = 16 * rng.choice([1, 2, 3, 4]), 8 * rng.choice([1, 2, 5, 8]), 32 * rng.choice([1, 2, 3])
    case = Case(
        m, n, k, types, turned, threads=32 * rng.choice([1, 2, 4]), policy=rng.choice(["Square", "FullRow", "FullCol"])
    )
    print(case)
    check(case)


@pytest.mark.parametrize("fragments", ["A", "B", "AB"])
@pytest.mark.parametrize("turned", TURNS, ids=str)
def test_fragments_stay_in_registers(check, fragments: str, turned, seed: int) -> None:
    rng = random.Random(seed)
    case = Case(
        64, 16 * rng.choice([1, 3]), 32, (H, H, F), turned, 128, "FullRow", fragments, k_slice=rng.random() < 0.5
    )
    run = check(case)
    became = run.ctx.build.remarks[-1].became
    assert became.count("registers in place") == len(fragments)


@pytest.mark.parametrize("versions", [0, 3])
def test_slices(check, versions: int, seed: int) -> None:
    rng = random.Random(seed)
    turned = rng.choice([False, True]), rng.choice([False, True])
    check(Case(64, 32, 32, (H, H, F), turned, 128, "FullRow", "", versions, True, True, rng.random() < 0.5))


@pytest.mark.parametrize("fragments", ["", "A", "B"])
def test_tf32_rounds(check, fragments: str, seed: int) -> None:
    run = check(Case(32, 24, 16, (F, F, F), threads=64, fragments=fragments), tf32=True)
    assert "tf32" in run.ctx.build.remarks[-1].became


def test_surplus_warps_repeat(check, seed: int) -> None:
    check(Case(16, 8, 16, (H, H, F), threads=128))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(8, 8, 16, (H, H, F)), "M = 8 is not a multiple of 16"),
        (Case(16, 12, 16, (H, H, F)), "N = 12 is not a multiple of 8"),
        (Case(16, 8, 24, (H, H, F)), "K = 24 is not a multiple of 16"),
        (Case(16, 8, 16, (F, F, F)), "no mma.sync on cuda:sm_90a multiplies float32 by float32 into float32"),
        (Case(16, 8, 16, (H, H, F), threads=48), "48 threads are not whole warps"),
        (Case(16, 8, 16, (B, B, B)), "no mma.sync on cuda:sm_90a multiplies bfloat16 by bfloat16 into bfloat16"),
    ],
)
def test_refusals(on_threads, case: Case, why: str) -> None:
    assert mma.refuses(case.op(on_threads, case.buffers(on_threads)), on_threads(case.threads).ctx) == why


def test_fp8_needs_sm_89(on_threads) -> None:
    case = Case(16, 8, 32, (F8, F8, F))
    assert "sm_80" in (mma.refuses(case.op(on_threads, case.buffers(on_threads)), on_threads(128, "sm_80").ctx) or "")
    assert mma.refuses(case.op(on_threads, case.buffers(on_threads)), on_threads(128, "sm_89").ctx) is None


def test_the_report_says_where_operands_come_from(check) -> None:
    run = check(Case(64, 64, 32, (H, H, F), (False, False)))
    note = run.ctx.build.remarks[-1]
    assert note.became == "mma.sync m16n8k16 float16, 2 x 2 warps of 32 x 32; A: ldmatrix; B: ldmatrix.trans"
    assert not note.why_not
    run = check(Case(64, 64, 32, (I8, I8, I32), (False, False)))
    assert "ldmatrix turns only 16-bit elements" in run.ctx.build.remarks[-1].why_not


@pytest.mark.parametrize("turned", TURNS, ids=str)
@pytest.mark.parametrize("fragments", ["", "A"])
def test_float8_is_widened_in_registers(check, fragments: str, turned, seed: int) -> None:
    """B of float8 beside 16 bits: slices, versions, any number of tiles, and what loads it."""
    rng = random.Random(seed)
    tiles, warps = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 4])
    case = Case(
        16, 8 * tiles * warps, 16 * rng.choice([1, 2, 3]), (rng.choice([H, B]), F8, F), turned, 32 * warps, "FullCol",
        fragments, rng.choice([0, 2]), rng.random() < 0.5, warps == 1 and rng.random() < 0.5, rng.random() < 0.5,
    )  # fmt: skip
    print(case)
    became = check(case).ctx.build.remarks[-1].became
    rows_of_16_bytes = turned[1] or (tiles * warps * (1 + case.n_slice)) % 2 == 0
    if rows_of_16_bytes and (turned[1] or (tiles % 2 == 0)):
        assert "widened in registers" in became, became
