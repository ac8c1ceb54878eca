# SPDX-License-Identifier: Apache-2.0
"""Scales of weights of few bits over their whole range: 0, tiny, huge, negative, infinite and NaN.

A product is right wherever the dtype of a holds the weights, and never finite where a scale is not.
"""

import pytest
import torch

from test.kernels.gemm.stored_weights import BF16, E8M0, F32, F64, HALF, I8, U8, Scheme
from torch_tile.kernels.gemm.dequant import dequant_gemm, dequantize
from torch_tile.kernels.gemm.formats import FORMATS
from torch_tile.kernels.gemm.tiling import Config

E4M3 = torch.float8_e4m3fn
SCHEMES = {
    "nf4": Scheme(U8, 4, high_first=True, group=64, a=HALF, format="nf4"),
    "nf4 in bfloat16": Scheme(U8, 4, high_first=True, group=64, format="nf4"),
    "nf4 with scales of bfloat16": Scheme(U8, 4, high_first=True, group=128, scale=BF16, a=HALF, format="nf4"),
    "nf4 with scales of float16": Scheme(U8, 4, high_first=True, group=64, scale=HALF, a=HALF, format="nf4"),
    "nf4 in bfloat16 with scales of float16": Scheme(U8, 4, high_first=True, group=64, scale=HALF, format="nf4"),
    "fp4": Scheme(U8, 4, high_first=True, group=64, a=HALF, format="fp4"),
    "fp4 by rows": Scheme(U8, 4, high_first=True, a=HALF, format="fp4"),
    "e2m1": Scheme(U8, 4, group=32, a=HALF, format="e2m1"),
    "mxfp4": Scheme(U8, 4, group=32, scale=E8M0, format="e2m1"),
    "mxfp4 in float16": Scheme(U8, 4, group=32, scale=E8M0, a=HALF, format="e2m1"),
    "nvfp4": Scheme(U8, 4, group=16, scale=E4M3, format="e2m1"),
    "nvfp4 in float16": Scheme(U8, 4, group=16, scale=E4M3, a=HALF, format="e2m1"),
    "int4": Scheme(I8, 4, group=64, scale=HALF, a=HALF),
    "uint4": Scheme(U8, 4, offset=8, group=64, a=HALF),
    "uint4 in bfloat16": Scheme(U8, 4, offset=8, group=128, scale=BF16),
    "uint4 with zeros": Scheme(U8, 4, group=64, zero=U8, scale=HALF, a=HALF),
    "uint4 with zeros of bfloat16": Scheme(U8, 4, group=64, zero=BF16, scale=BF16),
    "int8": Scheme(I8, a=HALF),
    "uint8 in groups": Scheme(U8, offset=128, group=64),
    "uint8 with zeros": Scheme(U8, group=64, zero=U8),
    "uint2": Scheme(U8, 2, offset=2, group=64, a=HALF),
    "bits": Scheme(U8, 1, group=64),
    "e4m3": Scheme(E4M3, group=64),
    "e5m2": Scheme(torch.float8_e5m2, group=64, a=HALF),
    "uint4 in float32": Scheme(U8, 4, group=32, offset=8, a=F32),
}
SIZES = [0.0, 1e-45, 2e-39, 3e-38, 1e-30, 1e-8, 3e-8, 3e-7, 1e-6, 3e-5, 7e-5, 1e-3, 1.0, 4e2, 3e3, 2e4, 6e4, 7e4, 2e5]
SIZES += [1e6, 1e8, 1.3e9, 1e20, 2e35, 1e37, 2e38]
HELD = {HALF: 2.0**31, BF16: 2.0**118}  # below which weights of one multiply-add do not overflow (see `packed.weight`)
SPREAD = 0.6  # of the scales of a row
LARGEST = 1e34  # sums of so large weights stay in float32


def operands(problems, scheme, groups, m):
    """a, words, scales, zeros of a product, and its weights in float64.

    A row of weights has scales of one size. Fields are those of weight 0 where a's dtype would not hold the weight.
    Last come rows with an infinite scale and with NaN.
    """
    pick = lambda *shape: torch.rand(shape, generator=problems.generator)  # noqa: E731
    sizes = torch.tensor(SIZES)[:, None]
    if scheme.bits < 4 or (scheme.bits == 8 and scheme.zero is not None):
        sizes = sizes[sizes[:, 0] * (1 + SPREAD) < HELD[scheme.a]]
    signs = 1 if scheme.scale == E8M0 else (pick(len(sizes), groups) - 0.3).sign()
    scale = (sizes * (1 + SPREAD * pick(len(sizes), groups)) * signs).to(scheme.scale)
    held = scale.float().isfinite() & ((scale.float() != 0) | (sizes == 0))
    scale = scale[held.all(1)]
    for odd in (float("inf"), float("nan")):
        if not torch.tensor(odd).to(scheme.scale).float().isfinite():
            row = torch.ones(1, groups).to(scheme.scale)
            row[0, problems.random.randrange(groups)] = odd
            scale = torch.cat([scale.float(), row.float()]).to(scheme.scale)
    n, k = len(scale), groups * (scheme.group or 256)
    zero = None if scheme.zero is None else (pick(n, groups) * 15).round().to(scheme.zero)
    shifts = torch.arange(0, 8, scheme.bits)
    shifts = shifts.flip(0) if scheme.high_first else shifts

    def packed(fields):
        if scheme.words.is_floating_point:
            return fields
        return (fields.view(n, -1, len(shifts)) << shifts).sum(-1).to(U8).view(scheme.words)

    def weights(b):
        form = scheme.bits, scheme.high_first, scheme.offset
        return dequantize(b, scale.double(), zero, *form, F64, scheme.format)

    if scheme.words.is_floating_point:
        fields = torch.randn(n, k, generator=problems.generator).to(scheme.words)
    else:
        fields = torch.randint(0, 1 << scheme.bits, (n, k), generator=problems.generator)
    most = min(torch.finfo(scheme.a).max * 0.99, LARGEST)
    nothing = torch.zeros(n, k, dtype=fields.dtype)
    if scheme.zero is not None:
        nothing = zero.long().repeat_interleave(k // groups, 1)
    elif scheme.format == "nf4":
        nothing += 7
    elif not scheme.format and not scheme.words.is_floating_point:
        nothing += scheme.offset
    fields = torch.where(weights(packed(fields)).abs() > most, nothing, fields)
    a = torch.randn(m, k, generator=problems.generator).to(scheme.a) / 8
    b = packed(fields)
    return a, b, scale, zero, weights(b)


@pytest.mark.parametrize("engine", ["cpu", "threads", "text"], indirect=True)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("few", [True, False])
def test_scales_of_all_sizes(name, few, engine, problems):
    scheme = SCHEMES[name]
    m = problems.pick(1, 16, 17) if few else problems.pick(65, 100)
    a, *stored = operands(problems, scheme, 256 // (scheme.group or 256), m)
    check_product(scheme, a, *stored)
    if scheme.format:
        check_product(scheme, a, *those_within(torch.finfo(scheme.a).max, *stored))


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("form", [{}, {"splits": 2}, {"splits": 2, "cluster": True}], ids=["whole", "split", "cluster"])
def test_scales_in_parts(form, engine, problems):
    """Tiles sum their own part of K anew where a scale is beyond the operand's dtype, in all forms of the kernel."""
    scheme = SCHEMES[problems.pick("nf4", "nf4 in bfloat16", "e2m1", "mxfp4 in float16", "fp4")]
    columns = 512 * problems.pick(1, 2)
    a, *stored = operands(problems, scheme, columns // scheme.group, problems.size(70))
    for most in (torch.finfo(scheme.a).max, torch.finfo(F32).max):
        check_product(scheme, a, *those_within(most, *stored), Config(128, 128, 128, 256, 2, **form))


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("name", ["nf4", "fp4", "e2m1"])
def test_small_scales_lose_a_step_at_most(name, engine):
    """Errors of halfway scales add up, as all numbers are the format's largest and all entries of a are 1."""
    scheme, n, k = SCHEMES[name], 40, 128
    values = FORMATS[scheme.format].values
    scale = ((torch.arange(n) + 0.5) * 2.0**-24)[:, None].repeat(1, k // scheme.group)
    b = torch.full((n, k // 2), 17 * values.index(max(values)), dtype=U8)
    weights = (scale.double() * max(values)).repeat_interleave(scheme.group, 1)
    check_product(scheme, torch.ones(65, k, dtype=HALF), b, scale, None, weights)


def those_within(most, b, scale, zero, weights):
    """Rows of weights whose scales are finite, and a number of e2m1 times each scale is at most so large."""
    held = (scale.float().abs() <= most / 8).all(1)
    return b[held], scale[held], None if zero is None else zero[held], weights[held]


def check_product(scheme, a, b, scale, zero, weights, config=None):
    """Compare a product with float64, up to one step of the operand's least numbers for each weight."""
    zeros = [] if zero is None else [zero]
    args = a, [b], [scale], zeros, scheme.bits, scheme.high_first, scheme.offset, [], "", ""
    got = dequant_gemm(*args, F32, scheme.format, config=config).double()
    want = a.double() @ weights.mT
    finite = scale.float().isfinite().all(1)
    assert got[:, scale.float().isnan().any(1)].isnan().all()
    assert not got[:, ~finite].isfinite().any()
    info, sizes = torch.finfo(scheme.a), a.double().abs()
    steps = scale.double().abs().repeat_interleave(a.shape[1] // scale.shape[1], 1)
    late = 2.0**-15 * steps if scheme.bits < 4 or scheme.zero is not None else 0 * steps  # see `packed.weight`
    bound = 2 * info.eps * (sizes @ weights.abs().mT) + sizes @ (info.smallest_normal * info.eps + late).mT
    wrong = ~((got - want).abs() <= bound + 2.0**-148)[:, finite]
    assert not wrong.any(), (
        len(a),
        scale[finite][wrong.any(0), 0],
        got[:, finite][wrong][:8],
        want[:, finite][wrong][:8],
    )
