# SPDX-License-Identifier: Apache-2.0
"""Scales of float8 and int8 products over their whole range: 0, tiny, huge, negative, infinite and NaN.

A result is right where float32 holds the products of two scales, and never finite where a scale is not.
"""

import math

import pytest
import torch

from test.kernels.gemm.test_scaled import E4M3, F32, FORMS
from torch_tile.kernels.gemm.scaled import scaled_gemm

SIZES = [0.0, 2.0**-149, 1e-38, 2e-38, 1e-30, 1e-19, 1e-8, 1.0, -2.0, 448.0, 1e8, 1e18, 1e30, 2e36, 3e38]
ODD = [math.inf, -math.inf, math.nan]
LARGEST = torch.finfo(F32).max


def scales_of(problems, form, rows, groups):
    """Scales `[rows, groups]` of a form. A row has scales of one size; one size for all if rows share scales."""
    kind, grouped = form
    sizes = SIZES + ODD
    if kind != "own":
        sizes = [problems.pick(*sizes)]
    found = torch.tensor([sizes[i % len(sizes)] for i in range(rows)], dtype=F32)[:, None]
    found = found.repeat(1, groups if grouped else 1)
    return found if kind == "own" else found[:1]


@pytest.mark.parametrize("engine", ["cpu", "threads", "text"], indirect=True)
@pytest.mark.parametrize("stored", [E4M3, torch.int8])
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_all_sizes(form, stored, engine, problems):
    m, n, groups = len(SIZES + ODD), len(SIZES + ODD) + problems.pick(0, 3), problems.pick(1, 2, 3)
    times, k = 1.0 if stored == E4M3 else 40.0, 128 * groups
    a, b = (problems.tensor(rows, k, layout="dense").mul(times).clamp(-127, 127).to(stored) for rows in (m, n))
    a[problems.random.randrange(m)] = 0
    scale_a, scale_b = (scales_of(problems, each, x, groups) for each, x in zip(FORMS[form], (m, n), strict=True))
    got = scaled_gemm(a, b.t(), scale_a, scale_b.t(), [], "", "", F32).double()
    by_runs = [x.shape[1] > 1 for x in (scale_a, scale_b)]
    of_a, of_b = scale_a[:, :1].double().expand(m, n), scale_b[:, :1].double().t().expand(m, n)
    factor = (of_a * of_b).abs()
    sums = a.double().abs() @ b.double().abs().t()
    want = (a.double() @ b.double().t()) * (of_a * of_b)
    odd = ~(of_a.isfinite() & of_b.isfinite())
    assert not got[odd].isfinite().any()
    # Scales of runs multiply the sums of runs, and the other scale their sum. Else the product of both does.
    first = factor if by_runs[0] == by_runs[1] else (of_a if by_runs[0] else of_b).abs()
    bound = 1e-5 * factor * sums + 2.0**-149 * (groups + 1)
    lost = sums if first is factor else groups * factor / first.clamp_min(2.0**-149)
    bound += torch.where(first < torch.finfo(F32).tiny, 2.0**-149 * lost, 0.0)
    held = ~odd & (first * sums.clamp_min(1) <= LARGEST) & (factor * sums <= LARGEST)
    assert held.any() or any(kind != "own" for kind, _ in FORMS[form])
    wrong = ~((got - want).abs() <= bound) & ~odd & (held | got.isfinite())
    assert not wrong.any(), (groups, of_a[wrong][:8], of_b[wrong][:8], got[wrong][:8], want[wrong][:8])
