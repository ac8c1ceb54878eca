# SPDX-License-Identifier: Apache-2.0
"""Norms whose results are rounded with scales: close to float64, and as the norm and the rounding one by one."""

import pytest
import torch

from torch_tile.kernels.norm import fused
from torch_tile.kernels.norm.fused_quantize import fused_norm_quantize, reference
from torch_tile.kernels.norm.quantize import LARGEST

F32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
ADD, WEIGH = "v0=add(acc0,x0);ret v0", "v0=mul(acc0,x1);ret v0"
STEP = {torch.float8_e4m3fn: 0.0, torch.float8_e5m2: 0.0, torch.int8: 0.5}  # of a number, besides its relative error
RELATIVE = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.int8: 0.0}


def arguments(problems, m, n, dtype, centred, keep):
    """Of `fused_norm`: a norm of a sum with a residual, with a weight."""
    aux = [problems.tensor(m, n, dtype=dtype), problems.tensor(n, dtype=dtype)]
    return problems.tensor(m, n, dtype=dtype), aux, "tr", ADD, WEIGH, centred, 1e-5, keep, dtype


def compare(got, norm, group, out_dtype, what):
    """Values times scales are y within the format's step, and scales are y's largest magnitudes."""
    x, aux, *rest = norm
    y, total = fused.reference(x.double(), [v.double() for v in aux], *rest[:-1], torch.float64)
    values, scales, kept = got
    n = x.shape[-1]
    wide = scales.double().repeat_interleave(group or n, -1)[..., :n]
    slack = {F32: 1e-6, HALF: 2e-3, BF16: 1.6e-2}[x.dtype]
    off = (values.double() * wide - y).abs()
    small = y.abs() * (RELATIVE[out_dtype] + slack) + wide * (STEP[out_dtype] + 2.0**-9)
    assert (off <= small + slack * y.abs().amax()).all(), f"{what}: {(off - small).max()}"
    runs = torch.nn.functional.pad(y, (0, scales.shape[-1] * (group or n) - n))
    most = runs.unflatten(-1, (scales.shape[-1], -1)).abs().amax(-1) / LARGEST[out_dtype]
    lost = 1e-30 + float(slack / 8 * y.abs().amax() / LARGEST[out_dtype])  # a sum may cancel a group
    torch.testing.assert_close(scales.double(), most, rtol=2 * slack, atol=lost, msg=lambda m: f"{what}: {m}")
    assert kept.shape == (x.shape if rest[-2] else (0,))
    if rest[-2]:
        torch.testing.assert_close(kept.double(), total, rtol=slack, atol=slack)


@pytest.mark.parametrize("out_dtype", LARGEST)
@pytest.mark.parametrize("centred", [False, True])
def test_random_problems(centred, out_dtype, rounds, problems):
    for number in rounds(2):
        m, n, group = problems.size(40), problems.size(300), problems.pick(0, 16, 128)
        dtype, keep = problems.pick(F32, HALF, BF16), problems.pick(False, True)
        norm = arguments(problems, m, n, dtype, centred, keep)
        got = fused_norm_quantize(*norm, group, out_dtype)
        compare(got, norm, group, out_dtype, f"{number}: {m}x{n} by {group}, {dtype}")


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize("group", [0, 64])
def test_on_gpus(group, engine, problems):
    """Whole vectors of 16 bytes, with a last run that is shorter."""
    norm = arguments(problems, problems.size(12), 8 * problems.size(24), HALF, problems.pick(False, True), True)
    norm = (norm[0].contiguous(), [x.contiguous() for x in norm[1]], *norm[2:])
    compare(fused_norm_quantize(*norm, group, torch.float8_e4m3fn), norm, group, torch.float8_e4m3fn, f"by {group}")


def test_rows_that_no_block_holds():
    """They are normalised and rounded by two kernels."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9000), torch.randn(9000)
    norm = x, [weight], "r", "", "v0=mul(acc0,x0);ret v0", False, 1e-5, False, F32
    for got, want in zip(fused_norm_quantize(*norm, 128, torch.int8), reference(*norm, 128, torch.int8), strict=True):
        assert got.shape == want.shape
        assert not got.numel() or (got.float() - want.float()).abs().max() <= 1  # halves may be rounded either way


def test_rows_with_nan_are_nan():
    x = torch.ones(3, 40)
    x[1, 5] = torch.nan
    values, scales, _ = fused_norm_quantize(x, [], "", "", "", False, 1e-5, False, F32, 0, torch.float8_e4m3fn)
    assert values.float()[1].isnan().all()
    assert scales[1].isnan().all() and scales[[0, 2]].isfinite().all()
