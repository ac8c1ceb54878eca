# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of groups of rows of float8, whose sum runs over the rows of a group, against float64."""

import importlib
from functools import partial

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.grouped_scaled_wgrad import k_grouped_scaled_gemm, reference
from torch_tile.kernels.gemm.tiling import Config

E4M3, E5M2, F32, F64, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64, torch.bfloat16
FORMS = {  # what scales a row of a and a column of b: one number, a number each, for each group or each run of 128
    "one": ("one", "one"),
    "rows": ("rows", "rows"),
    "groups": ("groups", "groups"),
    "matrices": ("matrices", "groups"),
    "runs": ("runs", "runs"),
    "mixed": ("runs", "groups"),
}


def scales(problems, form, groups, rows, columns):
    """Positive scales of `rows x columns` numbers."""
    runs = -(-columns // 128)
    shape = {
        "one": (1, 1, 1), "rows": (1, rows, 1), "matrices": (groups, 1, 1), "groups": (groups, rows, 1),
        "runs": (1, rows, runs),
    }[form]  # fmt: skip
    return problems.tensor(*shape).abs() + 0.1


def ends_of(problems, form, groups, most, step=1):
    """Ends of groups at random multiples; of 128 where runs have scales. Some groups have no columns."""
    step = 128 if "runs" in form else step
    ends = sorted(step * problems.random.randint(0, most // step) for _ in range(groups))
    if problems.pick(True, False):
        ends[-1] = most  # in the middle of a run, perhaps
    return torch.tensor(ends, dtype=torch.int32)


def arguments(problems, form, offsets, m, n, k, dtypes=(E4M3, E4M3)):
    """Of `k_grouped_scaled_gemm`, up to the dtype. Columns of no group are NaN."""
    a, b = problems.tensor(m, k).contiguous(), problems.tensor(n, k).contiguous()
    a[:, int(offsets[-1]) :] = torch.nan
    b[:, int(offsets[-1]) :] = torch.nan
    groups = offsets.shape[0]
    factors = scales(problems, form[0], groups, m, k), scales(problems, form[1], groups, n, k).mT
    return a.to(dtypes[0]), b.to(dtypes[1]).mT, *factors, offsets


def exact(a, b, scale_a, scale_b, offsets):
    return reference(*(x.double() for x in (a, b, scale_a, scale_b)), offsets, F64)


def test_each_group_is_a_product_of_its_columns():
    a, b, offsets = torch.randn(4, 9, dtype=F64), torch.randn(9, 5, dtype=F64), torch.tensor([2, 2, 7])
    scale_a, scale_b = torch.rand(3, 4, 1), torch.rand(1, 1, 5)
    got = reference(a, b, scale_a, scale_b, offsets, F64)
    for g, (first, end) in enumerate(((0, 2), (2, 2), (2, 7))):
        want = (a[:, first:end] * scale_a[g]) @ (b[first:end] * scale_b[0])
        torch.testing.assert_close(got[g], want)


@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, rounds, problems, check):
    for number in rounds(2):
        config = problems.pick(None, Config(64, 64, 128, 128, 2))
        groups, m, n, k = problems.size(5), problems.size(100), problems.size(150), problems.size(600)
        offsets = ends_of(problems, FORMS[form], groups, k)
        args = arguments(problems, FORMS[form], offsets, m, n, k, problems.pick((E4M3, E4M3), (E5M2, E4M3)))
        dtype = problems.pick(F32, BF16)
        got = k_grouped_scaled_gemm(*args, dtype, config=config)
        check(got, partial(exact, *args), f"{number}: {offsets.tolist()} of {m} x {n} x {k}, {config}", dtype, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("form", ["rows", "groups", "runs", "mixed"])
def test_aligned_rows(form, engine, problems, check):
    """Bulk copies and wgmma on Hopper, which ragged sizes refuse."""
    groups, m, n, k = problems.size(3), 16 * problems.size(9), 16 * problems.size(9), 16 * problems.size(30)
    offsets = ends_of(problems, FORMS[form], groups, k, problems.pick(1, 16))
    args = arguments(problems, FORMS[form], offsets, m, n, k)
    got = k_grouped_scaled_gemm(*args, problems.pick(F32, BF16))
    check(got, partial(exact, *args), f"{offsets.tolist()} of {m} x {n} x {k}", got.dtype, own=True)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("capability", [80, 120])
def test_by_mma(capability, engine, problems, check, monkeypatch):
    machine = Machine(Target("cuda", capability), 4)
    name = "torch_tile.kernels.gemm.grouped_scaled_wgrad"
    monkeypatch.setattr(importlib.import_module(name), "machine_of", lambda x: machine)
    args = arguments(problems, FORMS["groups"], torch.tensor([77, 200, 256], dtype=torch.int32), 40, 70, 272)
    check(k_grouped_scaled_gemm(*args, F32), partial(exact, *args), str(capability), F32, own=True)


def test_nothing_to_multiply(engine):
    for groups, m, n, k in ((3, 0, 4, 8), (3, 4, 0, 8), (3, 4, 5, 0), (0, 4, 5, 8)):
        a, b = torch.zeros(m, k).to(E4M3), torch.zeros(k, n).to(E4M3)
        one, offsets = torch.ones(1, 1, 1), torch.full((groups,), k, dtype=torch.int32)
        assert torch.equal(k_grouped_scaled_gemm(a, b, one, one, offsets, F32), torch.zeros(groups, m, n))
