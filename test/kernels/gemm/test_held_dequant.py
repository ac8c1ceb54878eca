# SPDX-License-Identifier: Apache-2.0
"""Up to 16 rows times weights of 4 bits, whose columns warps hold in registers: results are those of float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from test.kernels.gemm.stored_weights import exact, exact_parts
from test.kernels.gemm.test_row_dequant import EXTREME_ROWS, HOPPER, SCHEMES, extreme_row, product
from torch_tile.kernels.gemm import held_dequant
from torch_tile.kernels.gemm.dequant import prepare
from torch_tile.kernels.gemm.held_dequant import chunks_of, config_for, fits, footprint
from torch_tile.kernels.gemm.tiling import Config


def run(args, config, chunks):
    """Launch the kernel by a tiling. Results are NaN before."""
    spec, problem, tensors = prepare(args, HOPPER)
    assert footprint(config, spec, chunks).fits(HOPPER.target)
    out = torch.full((problem.m, problem.n), float("nan"), dtype=args.dtype)
    assert chunks_of(config, problem.k // problem.group) == chunks
    held_dequant.run(spec, tensors, out, config, HOPPER)
    return out


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [1, 2])
def test_random_problems(scheme, count, engine, problems, check):
    """Odd numbers of rows, groups that are missing, blocks with several or no tiles, and parts of K."""
    scheme = SCHEMES[scheme]
    rows = problems.pick(8, 16)
    warps, chunks, splits = problems.pick((1, 2, 1), (2, 1, 1), (3, 2, 1), (2, 1, 3), (1, 2, 3), (3, 1, 2))
    covered = warps * chunks * splits
    n, k = problems.size(70), scheme.group * problems.pick(covered, max(2, covered - 1))
    m = problems.pick(rows, 1 + problems.size(rows) % rows)
    args = product(problems, scheme, n, k, count, m)
    args = args._replace(a=args.a / 8)  # float16 would not hold the product of two sums
    stages, blocks, tile = chunks * problems.pick(1, 2), problems.pick(1, 2, 5), problems.pick(32, 64)
    config = Config(rows, tile, scheme.group, 32 * warps, stages, splits, blocks=blocks)
    out = run(args, config, chunks)
    want = partial(exact, *args[:7], [args.aux[0].double()], args.kinds, args.epilogue, format=scheme.format)
    check(out, want, f"{m}x{n}x{k}, {count} products, {chunks} groups of a warp, {config}", scheme.a)


@pytest.mark.parametrize("engine", ["text"], indirect=True)
@pytest.mark.parametrize(("scheme", "size", "scale"), EXTREME_ROWS)
def test_rows_of_any_size(scheme, size, scale, engine, problems, check):
    """Numbers at the ends of bfloat16's range, those below float16's least normal one, and groups of zeros."""
    scheme = SCHEMES[scheme]
    args, groups = extreme_row(problems, scheme, size, scale)
    out = run(args, Config(8, 32, scheme.group, 128, 2, -(-groups // 8), blocks=2), 2)
    unit = size * scale
    want = partial(exact_parts, unit, *args[:10])
    check((out.double() / unit).to(scheme.a), want, f"{groups} groups", scheme.a)


def test_tilings_by_shape(problems):
    """5 to 8 rows of numbers take this kernel, 2 to 4 where slices leave multiprocessors idle. Few blocks cut K."""

    def tiling(n, k, m=8, scheme="uint4", count=1):
        spec, problem, _ = prepare(product(problems, SCHEMES[scheme], 8, k, count, m), HOPPER)
        problem = replace(problem, n=n)
        config = config_for(problem, spec, HOPPER) if fits(spec, problem, HOPPER) else None
        if config is None:
            return None
        assert footprint(config, spec, chunks_of(config, k // problem.group)).fits(HOPPER.target)
        assert chunks_of(config, k // problem.group) * problem.group == 256
        return config.splits, config.threads

    assert tiling(16384, 16384) == (4, 512) and tiling(28672, 4096) == (1, 512) and tiling(8192, 8192) == (2, 512)
    assert tiling(4096, 14336) == (4, 448) and tiling(18944, 3584, m=5) == (1, 448) and tiling(5120, 5120) == (2, 320)
    assert tiling(4096, 14336, m=4) == (4, 448) and tiling(8192, 8192, m=4) is None
    assert tiling(8192, 28672) is None and tiling(2048, 4096) is None and tiling(8192, 8192 + 128) is None
    for other in (tiling(8192, 8192, m=9), tiling(8192, 8192, count=2), tiling(8192, 8192, scheme="nf4")):
        assert other is None
    assert tiling(8192, 8192, scheme="uint4 with zeros") is None
    assert tiling(8192, 8192, scheme="int4 of 256 columns") == (2, 512)


@pytest.mark.parametrize("engine", ["text"], indirect=True)
def test_groups_of_different_sizes(engine, problems, check):
    """Groups share a row's power of two. Small ones keep their digits, so that large scales may make them count."""
    scheme, groups = SCHEMES["uint4"], 8
    args = product(problems, scheme, 1 + problems.size(30), groups * scheme.group, 1, 8)
    sizes = torch.tensor([2.0 ** -problems.pick(0, 4, 8, 16, 20) for _ in range(groups)])
    a = (args.a.view(8, groups, -1) * sizes[:, None]).view(8, -1).to(scheme.a)
    args = args._replace(a=a, scales=[(s / sizes).to(s.dtype) for s in args.scales])
    out = run(args, Config(8, 32, scheme.group, 128, 2, 1, blocks=2), 2)
    check(out, partial(exact, *args[:7], [args.aux[0].double()], args.kinds, args.epilogue), f"{sizes}", scheme.a)
