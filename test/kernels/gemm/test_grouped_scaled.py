# SPDX-License-Identifier: Apache-2.0
"""Groups of rows of float8 by matrices with scales of every form, against float64."""

import importlib

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.grouped_scaled import grouped_scaled_gemm, reference
from torch_tile.kernels.gemm.scaled import Scale
from torch_tile.kernels.gemm.tiling import Config

E4M3, E5M2, F32, F64, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64, torch.bfloat16
FORMS = {  # what scales a row of a and a column of b, and whether runs of 128 columns have their own
    "matrix": (("one", False), ("one", False)),
    "rows": (("own", False), ("own", False)),
    "blocks": (("own", True), ("block", True)),
    "runs": (("own", True), ("own", True)),
}


def scales(problems, form, rows, columns, *groups):
    """Positive scales of `rows x columns` numbers, some stored the other way round."""
    kind, grouped = form
    count = {"one": 1, "own": rows, "block": -(-rows // 128)}[kind]
    found = problems.tensor(*groups, count, -(-columns // 128) if grouped else 1).abs() + 0.1
    return found.mT.contiguous().mT if problems.pick(False, True) else found


def arguments(problems, form, groups, m, n, k, dtypes=(E4M3, E4M3)):
    """Of `grouped_scaled_gemm`, up to the auxiliary operands."""
    a, b = problems.tensor(m, k).to(dtypes[0]), problems.tensor(groups, n, k).to(dtypes[1]).mT
    scale_b = scales(problems, form[1], n, k, groups).mT
    return a, b, scales(problems, form[0], m, k), scale_b, problems.ends(groups, m)


def exact(a, b, scale_a, scale_b, offsets, aux, kinds, text):
    wide = [x.double() for x in (a, b, scale_a, scale_b)]
    return reference(*wide, offsets, [x.double() for x in aux], kinds, text, F64)


def test_each_group_has_its_matrix():
    a, b, offsets = torch.randn(9, 3, dtype=F64), torch.randn(4, 3, 5, dtype=F64), torch.tensor([2, 2, 7, 8])
    scale_a, scale_b = torch.rand(9, 1), torch.rand(4, 1, 5)
    got = reference(a, b, scale_a, scale_b, offsets, [], "", "v=add(acc0,1.0);ret v", F64)
    x, w = a * scale_a, b * scale_b
    want = torch.cat([x[:2] @ w[0], x[2:7] @ w[2], x[7:8] @ w[3], torch.zeros(1, 5, dtype=F64)]) + 1
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, rounds, problems, check):
    for number in rounds(2):
        config = problems.pick(None, Config(64, 64, 128, 128, 2), Config(64, 64, 128, 128, 2, panel=2, staged=True))
        groups, m, n, k = problems.size(6), problems.size(100), problems.size(150), problems.size(300)
        dtypes = problems.pick((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
        args = arguments(problems, FORMS[form], groups, m, n, k, dtypes)
        bias, dtype = problems.tensor(groups, n), problems.pick(F32, BF16)
        got = grouped_scaled_gemm(*args, [bias], "g", "v=add(acc0,x0);w=silu(v);ret w", dtype, config=config)
        want = exact(*args, [bias], "g", "v=add(acc0,x0);w=silu(v);ret w")
        check(got, want, f"{number}: {args[-1].tolist()} {m}x{n}x{k}, {dtypes}, {config}", dtype, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_aligned_rows(form, engine, problems, check):
    """Bulk copies and wgmma on Hopper, which ragged sizes refuse."""
    groups, m, n, k = problems.size(4), problems.size(140), problems.size(140), 128 * problems.pick(1, 2)
    args = arguments(problems, FORMS[form], groups, m, n, k)
    args = (args[0].contiguous(), args[1].mT.contiguous().mT, *args[2:])
    full = problems.tensor(m, n, dtype=BF16)
    got = grouped_scaled_gemm(*args, [full], "t", "v=add(acc0,x0);ret v", F32)
    check(got, exact(*args, [full], "t", "v=add(acc0,x0);ret v"), f"{m}x{n}x{k}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
def test_scales_by_bulk_copies_of_rows_that_begin_anywhere(engine, problems, check):
    """Bulk copies begin at multiples of 16 bytes, and groups at any row: they bring rows before the first one."""
    m, n, k = 4 * problems.size(40), problems.size(140), 128 * problems.pick(2, 5)
    a, b, _, scale_b, _ = arguments(problems, FORMS["blocks"], 3, m, n, k)
    scale_a = (problems.tensor(k // 128, m).abs() + 0.1).contiguous().mT
    first = problems.random.randint(0, m)
    args = (a, b, scale_a, scale_b, torch.tensor([first, min(first + 1, m), m], dtype=torch.int32))
    assert Scale.of(scale_a, m, k, bulk=True)[0].bulk
    got = grouped_scaled_gemm(*args, [], "", "", F32)
    check(got, exact(*args, [], "", ""), f"{args[-1].tolist()} {m}x{n}x{k}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("capability", [80, 120])
def test_by_mma(capability, engine, problems, check, monkeypatch):
    """By float16 on Ampere, which has no float8 products, and by mma.sync of float8 elsewhere."""
    machine = Machine(Target("cuda", capability), 4)
    monkeypatch.setattr(
        importlib.import_module("torch_tile.kernels.gemm.grouped_scaled"), "machine_of", lambda x: machine
    )
    args = arguments(problems, FORMS["blocks"], 3, 40, 70, 272, (E4M3, E5M2))
    check(grouped_scaled_gemm(*args, [], "", "", F32), exact(*args, [], "", ""), str(capability), F32, own=True)


def test_nothing_to_multiply(engine, problems):
    for groups, m, n, k in ((3, 0, 4, 8), (3, 4, 0, 8), (3, 4, 5, 0), (0, 4, 5, 8)):
        a, b = torch.zeros(m, k).to(E4M3), torch.zeros(groups, k, n).to(E4M3)
        offsets = torch.full((groups,), m, dtype=torch.int32)
        got = grouped_scaled_gemm(a, b, torch.ones(1, 1), torch.ones(groups, 1, 1), offsets, [], "", "", F32)
        assert torch.equal(got, torch.zeros(m, n))
