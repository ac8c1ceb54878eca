# SPDX-License-Identifier: Apache-2.0
"""Few rows times weights of 4 bits by slices of K: results are those of float64, and tilings fit."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from test.kernels.gemm.stored_weights import BF16, HALF, I8, SWIGLU, U8, Scheme, arguments, exact, exact_parts
from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import row_dequant
from torch_tile.kernels.gemm.args import DequantGemmArgs
from torch_tile.kernels.gemm.dequant import prepare, reference
from torch_tile.kernels.gemm.row_dequant import SLICES, config_for, fits, footprint, groups_ordered
from torch_tile.kernels.gemm.tiling import Config

HOPPER = Machine(Target("cuda", 90), 132)
SCHEMES = {
    "int4": Scheme(I8, 4, group=64, scale=HALF, a=HALF),
    "as it is": Scheme(U8, 4, group=64, scale=BF16),
    "uint4": Scheme(U8, 4, group=128, offset=8, scale=BF16),
    "uint4 with zeros": Scheme(U8, 4, high_first=True, group=128, zero=U8, scale=HALF, a=HALF),
    "three words of a lane": Scheme(U8, 4, group=96, offset=3, scale=HALF, a=HALF),
    "int4 of 256 columns": Scheme(I8, 4, high_first=True, group=256, scale=BF16),
    "nf4": Scheme(U8, 4, group=64, scale=torch.float32, a=BF16, format="nf4"),
    "e2m1": Scheme(U8, 4, high_first=True, group=128, scale=HALF, a=HALF, format="e2m1"),
    "zeros of bfloat16": Scheme(U8, 4, group=64, zero=BF16, scale=BF16),
}


def product(problems, scheme, n, k, count=1, m=1):
    """Arguments of a product of `m` rows, with rows of scales and zeros that lie densely."""
    a, bs, scales, zeros, *fields = arguments(problems, scheme, m, n, k, count)
    dense = [[x.contiguous() for x in xs] for xs in (bs, scales, zeros)]
    row = problems.tensor(n, dtype=torch.float32)
    epilogue = SWIGLU if count == 2 else "v=add(acc0,x0);ret v"
    return DequantGemmArgs(a.contiguous(), *dense, *fields, [row], "r", epilogue, scheme.a, scheme.format)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [1, 2])
def test_random_problems(scheme, count, engine, problems, check):
    """Odd numbers of rows, last steps that are cut off, blocks with several or no tiles, and rows that are missing."""
    scheme = SCHEMES[scheme]
    n, k = problems.size(40), scheme.group * (1 + problems.size(40))
    given, slices = problems.pick((1, 8), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8), (8, 1), (8, 2))
    m = problems.pick(given, 1 + problems.size(given) % given)
    args = product(problems, scheme, n, k, count, m)
    args = args._replace(a=args.a / 8)  # float16 would not hold the product of two sums
    spec, _, tensors = prepare(args, HOPPER)
    rows, blocks = problems.pick(64, 128), problems.pick(1, 2, 5)
    stages, resident = problems.pick(1, 2, 3), problems.pick(1, 2)
    config = Config(given, rows, scheme.group, 2 * rows, stages, slices, blocks=blocks, resident=resident)
    out = torch.full((m, n), float("nan"), dtype=scheme.a)
    row_dequant.run(spec, tensors, out, config, HOPPER)
    want = partial(exact, *args[:7], [args.aux[0].double()], args.kinds, args.epilogue, format=scheme.format)
    check(out, want, f"{n}x{k}, {count} products, {config}", scheme.a)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weight", [None, "as a", torch.float32])
@pytest.mark.parametrize("count", [1, 2])
def test_norms_in_front(scheme, weight, count, engine, problems, check):
    """The row is normalised in the kernel. Its last groups may be missing in the last step."""
    scheme = SCHEMES[scheme]
    n, groups = 1 + problems.size(20), 1 + problems.size(30)
    args = product(problems, scheme, n, groups * scheme.group, count)
    wanted = None if weight is None else scheme.a if weight == "as a" else weight
    factors = None if wanted is None else problems.tensor(args.a.shape[1], dtype=wanted)
    a = (args.a * problems.pick(1 / 64, 1.0, 64.0)).to(scheme.a)
    scales = [(x / 64).to(x.dtype) for x in args.scales]  # float16 would not hold the product of two sums
    args = args._replace(a=a, scales=scales, norm_weight=factors, norm_eps=problems.pick(1e-6, 1e-2))
    spec, _, tensors = prepare(args, HOPPER)
    rows, stages = problems.pick(64, 128), problems.pick(1, 2, 3)
    config = Config(1, rows, scheme.group, 2 * rows, stages, SLICES, blocks=problems.pick(1, 2, 5), resident=1)
    out = torch.full((1, n), float("nan"), dtype=scheme.a)
    row_dequant.run(spec, tensors, out, config, HOPPER)
    wide = args._replace(
        a=a.double(), scales=[x.double() for x in args.scales], aux=[args.aux[0].double()], dtype=torch.float64
    )
    check(out, partial(reference, *wide), f"{n} x {groups} groups, {count} products, {config}", scheme.a)


@pytest.mark.parametrize("engine", ["text"], indirect=True)
@pytest.mark.parametrize("scheme", ["uint4", "int4"])
def test_results_that_cancel(scheme, engine, problems, check):
    """Each result is as small as rounding of its parts: these bound its error, and a wrong number is beyond them."""
    scheme = SCHEMES[scheme]
    n, groups = 1 + problems.size(20), 1 + problems.size(30)
    args = product(problems, scheme, n, groups * scheme.group, 2)
    less = exact(*args[:7], [], "", "v=mul(acc1,-1.0);ret v", format=scheme.format)
    args = args._replace(a=args.a / 8, aux=[(less[0] / 8).float()])
    spec, _, tensors = prepare(args, HOPPER)
    config = Config(1, 64, scheme.group, 128, 2, SLICES, blocks=2, resident=1)
    out = torch.full((1, n), float("nan"), dtype=scheme.a)
    row_dequant.run(spec, tensors, out, config, HOPPER)
    want = partial(exact, *args[:7], [args.aux[0].double()], args.kinds, args.epilogue, format=scheme.format)
    check(out, want, f"{n} x {groups} groups", scheme.a)
    with pytest.raises(AssertionError, match="error"):
        check(out + 100, want, "wrong", scheme.a)


# Numbers at the ends of bfloat16's range, and those below float16's least normal one.
EXTREME_ROWS = [("uint4", 2.0**-120, 1), ("uint4", 2.0**110, 1), ("int4", 2.0**-20, 2.0**12)]


def extreme_row(problems, scheme, size, scale):
    """Draw a product of one row whose numbers are of a `size`, one of its groups all zeros. Also return the groups."""
    n, groups = 1 + problems.size(20), 16 + problems.size(8)
    a, bs, scales, *rest = arguments(problems, scheme, 1, n, groups * scheme.group)
    a = a.contiguous().view(groups, -1) * size
    a[problems.size(8)] = 0
    a = a.view(1, -1)
    scales = [(x.contiguous() * scale).to(scheme.scale) for x in scales]
    args = DequantGemmArgs(a, [b.contiguous() for b in bs], scales, *rest, [], "", "", scheme.a, "")
    return args, groups


@pytest.mark.parametrize("engine", ["text"], indirect=True)
@pytest.mark.parametrize(("scheme", "size", "scale"), EXTREME_ROWS)
def test_rows_of_any_size(scheme, size, scale, engine, problems, check):
    """Numbers at the ends of bfloat16's range, those below float16's least normal one, and groups of zeros."""
    scheme = SCHEMES[scheme]
    args, groups = extreme_row(problems, scheme, size, scale)
    n = args.bs[0].shape[0]
    spec, _, tensors = prepare(args, HOPPER)
    config = Config(1, 64, scheme.group, 128, 2, SLICES, blocks=2, resident=1)
    out = torch.full((1, n), float("nan"), dtype=scheme.a)
    row_dequant.run(spec, tensors, out, config, HOPPER)
    unit = size * scale
    want = partial(exact_parts, unit, *args[:10])
    check((out.double() / unit).to(scheme.a), want, f"{n} x {groups} groups", scheme.a)


def test_which_products_fit(problems):
    def fit(scheme=SCHEMES["uint4"], n=40, k=1024, machine=HOPPER, rows=1):
        args = product(problems, scheme, n, k)
        args = args._replace(a=args.a.expand(rows, k).contiguous())
        spec, problem, _ = prepare(args, machine)
        return fits(spec, problem, machine)

    assert fit() and fit(n=1) and fit(k=1024 + 128)
    assert all(fit(scheme, k=16 * scheme.group) for scheme in SCHEMES.values())
    assert fit(SCHEMES["nf4"], rows=2) and not fit(SCHEMES["nf4"], rows=3)
    assert not fit(Scheme(U8, 4, group=32, format="nf4", a=HALF))
    assert fit(rows=8) and not fit(rows=9) and not fit(machine=Machine(Target("cuda", 80), 108))
    assert not fit(Scheme(U8, 4, group=32, scale=HALF, a=HALF)) and not fit(Scheme(I8, 8, group=128, scale=HALF))
    assert not fit(Scheme(U8, 4, scale=HALF, a=HALF))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tilings_fit(scheme, problems):
    for count, k, m in itertools.product((1, 2), (2048, 4096, 6144, 11008, 14336, 28672), (1, 2, 3, 8)):
        spec, problem, _ = prepare(product(problems, SCHEMES[scheme], 32, k, count, m), HOPPER)
        config = config_for(replace(problem, n=problems.pick(4096, 14336, 28672)), spec, HOPPER)
        if config is None and (m > 1 or problem.coded):
            continue
        assert m <= config.block_m < 2 * m and config.block_k == problem.group
        bytes_ = footprint(config, spec, groups_ordered(config, k // problem.group)).bytes
        assert config.resident * bytes_ <= HOPPER.target.shared_limit
        assert config.resident * config.threads >= 512


def test_tilings_by_shape(problems):
    def tiling(n, k, count=1, scheme="uint4", m=1):
        spec, problem, _ = prepare(product(problems, SCHEMES[scheme], 8, k, count, m), HOPPER)
        config = config_for(replace(problem, n=n), spec, HOPPER)
        return config and (config.splits if m > 1 else (config.resident, config.threads))

    assert tiling(4096, 4096) == tiling(28672, 4096) == tiling(14336, 4096, 2) == (1, 512)
    assert tiling(6144, 4096) == (3, 256)
    assert tiling(4096, 14336) == tiling(16384, 16384) == (1, 512)
    assert tiling(11008, 4096, 2) == tiling(2560, 2560) == (1, 512) and tiling(5120, 5120) == (3, 256)
    assert tiling(2048, 4096) == tiling(13824, 5120) == (2, 256)
    assert tiling(4096, 4096, scheme="nf4") == tiling(28672, 4096, scheme="nf4") == (1, 512)
    assert tiling(6144, 4096, scheme="nf4") == (3, 256)
    for scheme in ("nf4", "uint4"):
        assert tiling(28672, 4096, scheme=scheme, m=2) == 4 and tiling(4096, 4096, scheme=scheme, m=2) == 8
    assert tiling(6144, 4096, m=3) == 4 and tiling(28672, 4096, m=4) == tiling(14336, 4096, 2, m=8) == 2
    assert tiling(4096, 14336, m=4) is None and tiling(4096, 4096, m=8) is None and tiling(16384, 16384, m=8) is None
    assert tiling(3072, 3072, m=4) is None and tiling(11008, 4096, m=4) is None
    assert tiling(1536, 8960, scheme="nf4") is None and tiling(13824, 5120, scheme="nf4") is None
    assert tiling(16384, 16384, m=2) == 4 and tiling(16384, 16384, scheme="nf4", m=2) is None


def test_rows_too_long_for_shared_memory_do_not_fit(problems):
    spec, problem, _ = prepare(product(problems, SCHEMES["uint4"], 8, 1 << 17), HOPPER)
    assert config_for(problem, spec, HOPPER) is None
