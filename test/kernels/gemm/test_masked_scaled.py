# SPDX-License-Identifier: Apache-2.0
"""Groups of equally many rows of float8, of which the first few count, against float64."""

import importlib
from functools import partial

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.masked_scaled import masked_scaled_gemm, reference
from torch_tile.kernels.gemm.tiling import Config

E4M3, E5M2, F32, F64, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64, torch.bfloat16
FORMS = {  # what scales a row of a and a column of b, and whether runs of 128 columns have their own
    "matrix": (("one", False), ("one", False)),
    "rows": (("own", False), ("own", False)),
    "blocks": (("own", True), ("block", True)),
    "runs": (("own", True), ("own", True)),
}


def scales(problems, form, groups, rows, columns):
    """Positive scales of `rows x columns` numbers of each group."""
    kind, grouped = form
    count = {"one": 1, "own": rows, "block": -(-rows // 128)}[kind]
    return problems.tensor(groups, count, -(-columns // 128) if grouped else 1).abs() + 0.1


def arguments(problems, form, groups, m, n, k, dtypes=(E4M3, E4M3)):
    """Of `masked_scaled_gemm`, up to the auxiliary operands. Rows that do not count are NaN."""
    a, b = problems.tensor(groups, m, k).contiguous(), problems.tensor(groups, n, k).contiguous().to(dtypes[1]).mT
    counts = torch.tensor([problems.random.choice([0, m, problems.random.randint(0, m)]) for _ in range(groups)])
    a[torch.arange(m) >= counts[:, None]] = torch.nan
    factors = scales(problems, form[0], groups, m, k), scales(problems, form[1], groups, n, k).mT
    return a.to(dtypes[0]), b, *factors, counts.int()


def exact(a, b, scale_a, scale_b, counts, aux, kinds, text):
    wide = [x.double() for x in (a, b, scale_a, scale_b)]
    return reference(*wide, counts, [x.double() for x in aux], kinds, text, F64)


def test_rows_that_count_are_products_and_others_are_zero():
    a, b, counts = torch.randn(3, 4, 5, dtype=F64), torch.randn(3, 5, 6, dtype=F64), torch.tensor([0, 3, 4])
    scale_a, scale_b = torch.rand(3, 4, 1), torch.rand(3, 1, 6)
    got = reference(a, b, scale_a, scale_b, counts, [], "", "v=add(acc0,1.0);ret v", F64)
    want = (a * scale_a) @ (b * scale_b) + 1
    want[0], want[1, 3:] = 0, 0
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, rounds, problems, check):
    for number in rounds(2):
        config = problems.pick(None, Config(64, 64, 128, 128, 2))
        groups, m, n, k = problems.size(5), problems.size(100), problems.size(150), problems.size(300)
        args = arguments(problems, FORMS[form], groups, m, n, k, problems.pick((E4M3, E4M3), (E5M2, E4M3)))
        bias, dtype = problems.tensor(groups, n), problems.pick(F32, BF16)
        got = masked_scaled_gemm(*args, [bias], "g", "v=add(acc0,x0);w=silu(v);ret w", dtype, config=config)
        want = partial(exact, *args, [bias], "g", "v=add(acc0,x0);w=silu(v);ret w")
        check(got, want, f"{number}: {args[-1].tolist()} of {m} x {n} x {k}, {config}", dtype, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_aligned_rows(form, engine, problems, check):
    """Bulk copies and wgmma on Hopper, which ragged sizes refuse."""
    groups, m, n, k = problems.size(3), problems.size(140), problems.size(140), 128 * problems.pick(1, 2)
    args = arguments(problems, FORMS[form], groups, m, n, k)
    got = masked_scaled_gemm(*args, [], "", "", F32)
    check(got, partial(exact, *args, [], "", ""), f"{args[-1].tolist()} of {m} x {n} x {k}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("capability", [80, 120])
def test_by_mma(capability, engine, problems, check, monkeypatch):
    machine = Machine(Target("cuda", capability), 4)
    monkeypatch.setattr(
        importlib.import_module("torch_tile.kernels.gemm.masked_scaled"), "machine_of", lambda x: machine
    )
    args = arguments(problems, FORMS["blocks"], 3, 40, 70, 272, (E4M3, E5M2))
    check(masked_scaled_gemm(*args, [], "", "", F32), partial(exact, *args, [], "", ""), str(capability), F32, own=True)


def test_nothing_to_multiply(engine):
    for groups, m, n, k in ((3, 0, 4, 8), (3, 4, 0, 8), (3, 4, 5, 0), (0, 4, 5, 8)):
        a, b = torch.zeros(groups, m, k).to(E4M3), torch.zeros(groups, k, n).to(E4M3)
        one, counts = torch.ones(groups, 1, 1), torch.full((groups,), m, dtype=torch.int32)
        assert torch.equal(masked_scaled_gemm(a, b, one, one, counts, [], "", "", F32), torch.zeros(groups, m, n))
