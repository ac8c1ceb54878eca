# SPDX-License-Identifier: Apache-2.0
"""Up to eight rows times weights of 4 bits, whose blocks cut K among their warps: results are those of float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from test.kernels.gemm.stored_weights import exact, exact_parts
from test.kernels.gemm.test_row_dequant import EXTREME_ROWS, HOPPER, SCHEMES, extreme_row, product
from torch_tile.kernels.gemm import cut_dequant
from torch_tile.kernels.gemm.cut_dequant import (
    chunks_of_warp,
    cut_dequant_matmul,
    footprint,
    with_runs_of_factors,
)
from torch_tile.kernels.gemm.cut_rules import config_for, fit_tile_to_stages, fits
from torch_tile.kernels.gemm.dequant import prepare
from torch_tile.kernels.gemm.tiling import Config

OF_EIGHT_ROWS = [name for name, scheme in SCHEMES.items() if scheme.zero is None]  # zeros are left to slices


def run(args, config):
    """Launch the kernel by a tiling. Results are NaN before."""
    spec, problem, tensors = prepare(args, HOPPER)
    assert footprint(config, spec, chunks_of_warp(config, problem.k // problem.group)).fits(HOPPER.target)
    out = torch.full((problem.m, problem.n), float("nan"), dtype=args.dtype)
    cut_dequant.run(spec, tensors, out, config, HOPPER)
    return out


def fitting(args, config):
    """Return a tiling that fits the rows and shared memory, with fewer steps in flight if it must."""
    spec, problem, _ = prepare(args, HOPPER)
    groups = problem.k // problem.group
    tilings = [fit_tile_to_stages(replace(config, stages=stages), problem.n, groups) for stages in (config.stages, 1)]
    return next(c for c in tilings if footprint(c, spec, chunks_of_warp(c, groups)).fits(HOPPER.target))


def check_product(args, scheme, config, check):
    """Compare a product by a tiling with that of float64."""
    args = args._replace(a=args.a / 8)  # float16 would not hold the product of two sums
    out = run(args, config)
    want = partial(exact, *args[:7], [args.aux[0].double()], args.kinds, args.epilogue, format=scheme.format)
    check(out, want, f"{out.shape} x {args.a.shape[1]}, {len(args.bs)} products, {config}", scheme.a)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [1, 2])
def test_slices_of_random_problems(scheme, count, engine, problems, check):
    """Odd numbers of rows, chunks that are cut off, blocks with several or no tiles, and rows that are missing."""
    scheme = SCHEMES[scheme]
    given, cuts, teams = problems.pick(1, 2, 4), problems.pick(1, 2, 3), problems.pick(1, 2)
    most = min(40, 160 // (given * count))  # groups whose sums fit shared memory
    n, k = problems.size(40), scheme.group * (1 + problems.size(most))
    m = problems.pick(given, 1 + problems.size(given) % given)
    args = product(problems, scheme, n, k, count, m)
    stages, blocks, rows = problems.pick(1, 2, 4), problems.pick(1, 2, 5), problems.pick(0, 32)  # 0: one round
    config = Config(given, rows, scheme.group, 32 * cuts * teams, stages, cuts, blocks=blocks)
    check_product(args, scheme, fitting(args, config), check)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", OF_EIGHT_ROWS)
@pytest.mark.parametrize("count", [1, 2])
def test_eight_rows_of_random_problems(scheme, count, engine, problems, check):
    """Odd numbers of rows, groups that are missing, blocks with several or no tiles, and parts of K."""
    scheme = SCHEMES[scheme]
    warps, chunks, blocks_of_k = problems.pick((1, 2, 1), (2, 1, 1), (3, 2, 1), (2, 1, 3), (1, 2, 3), (3, 1, 2))
    covered = warps * chunks * blocks_of_k
    n, k = problems.size(70), scheme.group * problems.pick(covered, max(2, covered - 1))
    args = product(problems, scheme, n, k, count, problems.pick(8, 1 + problems.size(8) % 8))
    blocks, tile = problems.pick(1, 2, 5), problems.pick(32, 64)
    config = Config(8, tile, scheme.group, 32 * warps, chunks, warps * blocks_of_k, blocks=blocks)
    assert chunks_of_warp(config, k // scheme.group) == chunks
    check_product(args, scheme, config, check)


@pytest.mark.parametrize("engine", ["text"], indirect=True)
@pytest.mark.parametrize(("scheme", "size", "scale"), EXTREME_ROWS)
def test_rows_of_any_size(scheme, size, scale, engine, problems, check):
    """Numbers at the ends of bfloat16's range, those below float16's least normal one, and groups of zeros."""
    scheme = SCHEMES[scheme]
    args, groups = extreme_row(problems, scheme, size, scale)
    slices = fitting(args, Config(1, 32, scheme.group, 128, 2, 2, blocks=2))
    for config in (slices, Config(8, 32, scheme.group, 128, 2, 4 * -(-groups // 8), blocks=2)):
        out, unit = run(args, config), size * scale
        want = partial(exact_parts, unit, *args[:10])
        check((out.double() / unit).to(scheme.a), want, f"{groups} groups, {config}", scheme.a)


@pytest.mark.parametrize(("rows", "groups"), [(1, 8), (1, 16), (1, 32), (1, 64), (2, 32), (2, 64), (4, 32), (4, 64)])
def test_lanes_meet_other_banks(rows, groups, problems):
    """Sums of groups are stored and loaded without bank conflicts. Of four rows, two lanes that store share a bank."""
    args = product(problems, SCHEMES["int4"], 24, 64 * groups, m=rows)
    spec, problem, (a, *operands) = prepare(args, HOPPER)
    cuts = max(1, groups * rows // 8)
    config = Config(rows, 0, 64, 32 * min(cuts, 4), 4, min(cuts, 4), blocks=2)
    config = fit_tile_to_stages(config, problem.n, groups)
    spec = with_runs_of_factors(spec, operands)
    kernel = cut_dequant_matmul.on(HOPPER.target)(config, spec, chunks_of_warp(config, groups))
    out = torch.zeros(rows, problem.n, dtype=args.dtype)
    findings = kernel.interpret(a.unflatten(1, (-1, 64)), *operands, out)
    assert not findings, str(findings)
    ways = {what.split()[0]: banks.ways for (_, what), banks in findings.banks.items()}
    assert ways == {"write": 2.0 if rows == 4 else 1.0, "read": 1.0}


@pytest.mark.parametrize("engine", ["text"], indirect=True)
def test_groups_of_different_sizes(engine, problems, check):
    """Groups of eight rows share a power of two. Small ones keep their digits, so that large scales may make them
    count.
    """
    scheme, groups = SCHEMES["uint4"], 8
    args = product(problems, scheme, 1 + problems.size(30), groups * scheme.group, 1, 8)
    sizes = torch.tensor([2.0 ** -problems.pick(0, 4, 8, 16, 20) for _ in range(groups)])
    a = (args.a.view(8, groups, -1) * sizes[:, None]).view(8, -1).to(scheme.a)
    args = args._replace(a=a, scales=[(s / sizes).to(s.dtype) for s in args.scales])
    out = run(args, Config(8, 32, scheme.group, 128, 2, 4, blocks=2))
    check(out, partial(exact, *args[:7], [args.aux[0].double()], args.kinds, args.epilogue), f"{sizes}", scheme.a)


def tiling_of(problems, n, k, scheme, count, m):
    """Return the tiling of a problem, which must fit shared memory. None if the rule leaves it to another kernel."""
    spec, problem, _ = prepare(product(problems, SCHEMES[scheme], 8, k, count, m), HOPPER)
    problem = replace(problem, n=n)
    config = config_for(problem, spec, HOPPER) if fits(spec, problem, HOPPER) else None
    if config is not None:
        chunks = chunks_of_warp(config, k // problem.group)
        assert footprint(config, spec, chunks).fits(HOPPER.target) and config.stages % chunks == 0
    return config


def test_tilings_of_slices(problems):
    """Rows of codes of few columns and some of numbers take this kernel, by tilings that fit."""

    def tiling(n, k, scheme="uint4", count=1, m=1):
        config = tiling_of(problems, n, k, scheme, count, m)
        return config and (config.splits, config.threads, config.stages, config.block_n)

    assert tiling(16384, 16384) == (16, 512, 4, 8) and tiling(8192, 8192) == (8, 512, 2, 64)
    assert tiling(1536, 8960) == (9, 288, 2, 12) and tiling(5120, 5120) == (5, 480, 2, 48)
    assert tiling(28672, 4096) == (4, 512, 4, 32) and tiling(6144, 4096) == (4, 512, 2, 48)
    assert tiling(8192, 28672) == (14, 448, 4, 4) and tiling(13824, 5120) == (5, 480, 3, 18)
    assert tiling(4096, 4096) is None and tiling(4096, 14336) is None and tiling(256, 512) is None
    assert tiling(12288, 6144) == (6, 384, 4, 16) and tiling(12288, 5632) is None  # a chunk that is cut off
    assert tiling(28672, 4096, m=2) == (8, 512, 4, 32) and tiling(5120, 5120, m=2) == (10, 320, 2, 40)
    assert tiling(4096, 4096, m=3) == tiling(4096, 4096, m=4) == (16, 512, 2, 32)
    assert tiling(14336, 4096, count=2) == (4, 512, 1, 64) and tiling(8192, 3072, count=2) is None
    assert tiling(4096, 4096, "nf4") == (8, 512, 4, 16) and tiling(8192, 8192, "nf4") == (16, 512, 4, 64)
    assert tiling(4096, 11008, "nf4") == (11, 352, 4, 32) and tiling(1536, 8960, "nf4") == (9, 288, 4, 12)
    assert tiling(16384, 16384, "nf4") == (16, 512, 16, 16) and tiling(14336, 4096, "nf4", 2) == (8, 512, 2, 64)
    assert tiling(4096, 14336, "nf4") is None and tiling(256, 512, "nf4") is None and tiling(8192, 8192, "e2m1") is None


def test_tilings_of_eight_rows(problems):
    """5 to 8 rows of numbers take all columns of a product, 2 to 4 where slices leave multiprocessors idle. Few blocks
    cut K.
    """

    def tiling(n, k, m=8, scheme="uint4", count=1):
        config = tiling_of(problems, n, k, scheme, count, m)
        if config is None:
            return None
        assert config.block_m == 8 and config.stages * config.block_k == 256
        return 32 * config.splits // config.threads, config.threads, config.blocks

    assert tiling(16384, 16384) == (4, 512, 33) and tiling(28672, 4096) == (1, 512, 132)
    assert tiling(8192, 8192) == tiling(8192, 8192, scheme="int4 of 256 columns") == (2, 512, 66)
    assert tiling(4096, 14336) == (4, 448, 33) and tiling(18944, 3584, m=5) == (1, 448, 132)
    assert tiling(5120, 5120) == (2, 320, 66) and tiling(4096, 14336, m=4) == (4, 448, 33)
    assert tiling(8192, 28672) is None and tiling(2048, 4096) is None and tiling(8192, 8192 + 128) is None
    assert tiling(8192, 8192, m=4) is None and tiling(8192, 8192, m=9) is None and tiling(8192, 8192, count=2) is None
    assert all(tiling(8192, 8192, scheme=scheme) is None for scheme in ("nf4", "uint4 with zeros", "as it is"))
