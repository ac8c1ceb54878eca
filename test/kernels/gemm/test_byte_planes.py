# SPDX-License-Identifier: Apache-2.0
"""Products by planes of bytes: planes are a, sums run over every column once, and results are those of float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from test.kernels.gemm.stored_weights import BF16, F32, HALF, SWIGLU, U8, Scheme, arguments, exact
from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine, machine_of
from torch_tile.kernels.gemm import byte_planes
from torch_tile.kernels.gemm.args import DequantGemmArgs
from torch_tile.kernels.gemm.byte_planes import (
    COLUMNS,
    PLANES,
    ColumnOrder,
    columns_for,
    config_for,
    footprint,
    split_rows,
)
from torch_tile.kernels.gemm.dequant import dequant_gemm, prepare
from torch_tile.kernels.gemm.packed import Problem
from torch_tile.kernels.gemm.tiling import Config

HOPPER = Machine(Target("cuda", 90), 132)
I8 = torch.int8
SCHEMES = {
    "uint4": Scheme(U8, 4, group=128, offset=8, scale=HALF, a=HALF),
    "uint4 in short groups": Scheme(U8, 4, group=64, offset=8, scale=BF16),
    "int4, the high field first": Scheme(I8, 4, high_first=True, group=256, scale=F32, a=HALF),
    "int4 by rows": Scheme(I8, 4, scale=F32),
    "uint4 in short groups, the high field first": Scheme(
        U8, 4, high_first=True, group=64, offset=8, scale=F32, a=HALF
    ),
    "bare uint4": Scheme(U8, 4, offset=8, scale=None, a=HALF),
}


def dense(args):
    """Arguments whose scales and rows lie in memory as bulk copies want them."""
    a, bs, scales, *rest = args
    return (a.contiguous(), bs, [s.contiguous() for s in scales], *rest)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("splits", [1, 2])
def test_random_problems(scheme, splits, engine, problems, check):
    scheme, products = SCHEMES[scheme], problems.pick(1, 1, 2)
    columns, rows = problems.pick((8, 2), (16, 5), (24, 8), (48, 16))
    m, n, k = problems.size(rows), problems.size(150), (1024 if scheme.group > 64 else 512) * problems.size(4)
    config = Config(columns, 64, problems.pick(256, 512), 128, 2, splits, cluster=splits > 1, planes=True)
    args = dense(arguments(problems, scheme, m, n, k, products))
    row = problems.tensor(n, dtype=F32)
    epilogue = ([row], "r", SWIGLU if products == 2 else "v=add(acc0,x0);ret v")
    got = dequant_gemm(*args, *epilogue, F32, scheme.format, config=config)
    check(got, exact(*args, [row.double()], *epilogue[1:], format=scheme.format), f"{m}x{n}x{k} by {config}", BF16)


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("slots", [ColumnOrder(128, False), ColumnOrder(64, True)])
def test_planes_are_the_rows(dtype, slots, problems):
    """Each number is off by 2^-23 of the largest of its run; infinities and NaN make a run's unit that."""
    width, (m, runs) = slots.width, (3, 21)
    a = problems.tensor(m, runs * width, layout="dense").to(dtype)
    a *= torch.logspace(-3, 3, runs, base=10).to(dtype).repeat_interleave(width)
    a[0, 5], a[1, 7 * width], a[2, width : 2 * width] = torch.inf, torch.nan, 0.0
    planes = torch.zeros(16, runs * width, dtype=torch.int8)
    units = torch.zeros(runs, 16)
    machine_of(a).kernel(split_rows)(dtype, slots, 1)(a, planes, units)
    columns = torch.tensor([slots.column(slot) for slot in range(width)])
    assert sorted(columns.tolist()) == [*range(width)]
    assert all(slots.column(s) // 8 == slots.word(s) for s in range(width))
    found = planes[: m * PLANES].double().view(m, PLANES, runs, width) * units[:, : m * PLANES].T.reshape(
        m, PLANES, runs, 1
    )
    found = found.sum(1)
    given = a.double().view(m, runs, width)[..., columns]
    whole = given.isfinite().all(-1)
    assert torch.equal(found.isfinite().all(-1), whole)
    size = given.abs().amax(-1, keepdim=True).expand_as(given)
    assert ((found - given).abs() <= size * 2**-22)[whole].all()
    endless = given.isinf()
    assert torch.equal(found[endless], given[endless])
    assert not found[2, 1].any()


def test_columns_hold_the_planes_of_all_rows():
    for rows in range(1, 17):
        columns = columns_for(rows)
        assert columns in COLUMNS and columns >= PLANES * rows
    assert columns_for(17) is None


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
def test_infinities_reach_the_results(engine, problems):
    a, bs, scales, *rest = dense(arguments(problems, SCHEMES["uint4"], 3, 20, 1024))
    a[0, 3], a[1, 300] = torch.inf, torch.nan
    got = dequant_gemm(a, bs, scales, *rest, [], "", "", F32, config=Config(16, 64, 256, 128, 2, planes=True))
    want = exact(a, bs, scales, *rest, [], "", "")
    assert torch.equal(got.isfinite(), want.isfinite()) and torch.equal(got[0].isinf(), want[0].isinf())
    assert torch.equal(got[0][want[0].isinf()].double(), want[0][want[0].isinf()])


def test_which_weights_planes_fit(problems):
    def fit(k=512, **changes):
        scheme = replace(SCHEMES["uint4"], **changes)
        args = DequantGemmArgs(*dense(arguments(problems, scheme, 2, 16, k)), [], "", "", HALF, scheme.format)
        return prepare(args, HOPPER)[1].planes

    assert not fit(512)  # rows of 4 scales are no 16 bytes
    assert fit(1024) and fit(512, group=64) and fit(words=torch.int8, offset=0, scale=F32)
    assert (
        not fit(1024, zero=U8) and not fit(1024, offset=7) and not fit(1024, format="nf4", offset=0) and not fit(a=F32)
    )
    assert not fit(1024, group=32) and not fit(960, group=192) and not fit(1024, bits=2)


@pytest.mark.parametrize("products", [1, 2])
def test_tilings_fit(products):
    sizes = itertools.product((1, 2, 5, 16), (64, 4096, 6144, 16384, 100_000), (1024, 4096, 14336), (0, 64, 128))
    for m, n, k, group in sizes:
        config = config_for(Problem(HALF, m, n, k, products, 4, group, True, False, True), HOPPER)
        assert config.planes and config.block_m >= PLANES * m and config.stages >= 2
        assert config.splits == 1 or config.splits * byte_planes.LEAST_SHARE <= k
        taken = footprint(config, products, group, 4).bytes
        assert config.resident * taken <= HOPPER.target.shared_limit
