# SPDX-License-Identifier: Apache-2.0
"""Groups of rows of float8 by matrices with scales of every form, against float64."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import spec as gemm_spec
from torch_tile.kernels.gemm.grouped_scaled import HIGH, LOW, WIDE, grouped_scaled_gemm, reference, tiling_for
from torch_tile.kernels.gemm.scaled import GROUP, Problem, Scale, Spec, footprint
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
        want = partial(exact, *args, [bias], "g", "v=add(acc0,x0);w=silu(v);ret w")
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
    check(got, partial(exact, *args, [full], "t", "v=add(acc0,x0);ret v"), f"{m}x{n}x{k}", F32, own=True)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
def test_scales_by_bulk_copies_of_rows_that_begin_anywhere(engine, problems, check):
    """Bulk copies begin at multiples of 16 bytes, and groups at any row: they bring rows before the first one."""
    m, n, k = 4 * problems.size(40), problems.size(140), 128 * problems.pick(2, 5)
    a, b, _, scale_b, _ = arguments(problems, FORMS["blocks"], 3, m, n, k)
    scale_a = (problems.tensor(k // 128, m).abs() + 0.1).contiguous().mT
    first = problems.random.randint(0, m)
    args = (a, b, scale_a, scale_b, torch.tensor([first, min(first + 1, m), m], dtype=torch.int32))
    assert Scale.of(scale_a, m, k, bulk=True).bulk
    got = grouped_scaled_gemm(*args, [], "", "", F32)
    check(got, partial(exact, *args, [], "", ""), f"{args[-1].tolist()} {m}x{n}x{k}", F32, own=True)


# Microseconds on an H200 by tile, with scales of runs and without (h200_grouped_float8_2_2026-11-28.txt).
MEASURED = {
    (8, 8192, 14336, 4096, False): {"128x192": 821.2, "192x128": 871.1, "128x128": 893.1, "64x192": 1300.5},
    (32, 8192, 7168, 2048, False): {"128x192": 282.2, "192x128": 312.8, "128x128": 321.0, "64x192": 374.8},
    (64, 2048, 4096, 7168, False): {"128x192": 486.7, "192x128": 577.2, "64x192": 474.3, "64x128": 480.2},
    (16, 2048, 4096, 7168, False): {"128x192": 164.7, "192x128": 158.2, "128x128": 178.7, "64x128": 211.5},
    (128, 1024, 4096, 7168, False): {"128x192": 951.5, "192x128": 1183.5, "64x192": 886.9, "64x128": 903.4},
    (32, 128, 7168, 2048, False): {"128x192": 160.6, "192x128": 265.1, "64x192": 129.0, "64x128": 135.6},
    # By blocks, tiles whose columns lie in pieces: h200_tile_widths_2026-11-30.txt.
    (8, 8192, 14336, 4096, True): {"192x128": 907.6, "128x192": 911.2},
    (32, 8192, 7168, 2048, True): {"192x128": 339.7, "128x192": 302.0},
    (64, 2048, 4096, 7168, True): {"64x192": 474.4, "128x192": 488.7},
    (64, 6144, 4096, 7168, True): {"128x192": 523.0},
    (16, 8192, 2112, 7168, True): {"192x128": 250.9, "128x192": 227.9},
    (16, 2048, 4096, 7168, True): {"192x128": 163.6, "128x192": 170.9},
    (4, 1024, 2048, 2048, True): {"192x128": 20.4, "128x192": 20.5},
    (8, 1280, 7168, 4096, True): {"192x128": 101.5, "128x192": 119.8},
    (8, 2400, 4096, 7168, True): {"192x128": 151.1, "128x192": 162.5},
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_rules_choose_tiles_that_were_fast(shape):
    groups, *sizes, runs = shape
    problem = Problem(E4M3, *sizes, True, staged=True, runs=runs)
    config, times = tiling_for(problem, groups, Machine(Target("cuda", 90), 132)), MEASURED[shape]
    assert times[f"{config.block_m}x{config.block_n}"] <= 1.06 * min(times.values())


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("runs", [False, True])
def test_tiles_fit(runs, dtype):
    product = gemm_spec.Spec(E4M3, dtype, False, (True,), (), "ret acc0")
    for shared in (1, GROUP):
        scales = Scale(1, runs, True, runs), Scale(shared, runs, True, runs and shared == 1)
        spec = Spec(product, (E4M3, E4M3), (E4M3, E4M3), scales)
        for config in (LOW, HIGH, WIDE):
            tiles = footprint(replace(config, staged=True), spec, True, groups=True)
            assert tiles.bytes <= Target("cuda", 90).shared_limit, config


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_tiles_that_rules_choose(form, engine, problems, check):
    """Groups end anywhere in tiles whose results leave through shared memory."""
    for config in (LOW, HIGH, WIDE):
        m, n, k = config.block_m + problems.size(80), 64 + 16 * problems.size(10), 128 * problems.pick(1, 2)
        args = arguments(problems, FORMS[form], 3, m, n, k)
        args = (args[0].contiguous(), args[1].mT.contiguous().mT, *args[2:])
        got = grouped_scaled_gemm(*args, [], "", "", BF16, config=replace(config, staged=True, panel=8))
        check(got, partial(exact, *args, [], "", ""), f"{args[-1].tolist()} {m}x{n}x{k}, {config}", BF16, own=True)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("capability", [80, 120])
def test_by_mma(capability, engine, problems, check, monkeypatch):
    """By float16 on Ampere, which has no float8 products, and by mma.sync of float8 elsewhere."""
    machine = Machine(Target("cuda", capability), 4)
    monkeypatch.setattr(
        importlib.import_module("torch_tile.kernels.gemm.grouped_scaled"), "machine_of", lambda x: machine
    )
    args = arguments(problems, FORMS["blocks"], 3, 40, 70, 272, (E4M3, E5M2))
    want = partial(exact, *args, [], "", "")
    check(grouped_scaled_gemm(*args, [], "", "", F32), want, str(capability), F32, own=True)


def test_nothing_to_multiply(engine, problems):
    for groups, m, n, k in ((3, 0, 4, 8), (3, 4, 0, 8), (3, 4, 5, 0), (0, 4, 5, 8)):
        a, b = torch.zeros(m, k).to(E4M3), torch.zeros(groups, k, n).to(E4M3)
        offsets = torch.full((groups,), m, dtype=torch.int32)
        got = grouped_scaled_gemm(a, b, torch.ones(1, 1), torch.ones(groups, 1, 1), offsets, [], "", "", F32)
        assert torch.equal(got, torch.zeros(m, n))
