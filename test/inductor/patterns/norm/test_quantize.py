# SPDX-License-Identifier: Apache-2.0
"""Norms, or SwiGLU's products, and the rounding of their results become one kernel."""

import pytest
import torch
import torch.nn.functional as F

FLOAT8, BF16 = torch.float8_e4m3fn, torch.bfloat16
OPS = torch.ops.tile


def rms(x, r, w):
    return OPS.quantize_fp8(F.rms_norm(x, x.shape[-1:], w, 1e-5), 128, FLOAT8)


def rows(x, r, w):
    y = OPS.rms_norm(x, w, 1e-5, "silu", 1.0)
    return OPS.quantize_fp8(y.flatten(0, 1), 0, FLOAT8)


def of_sum(x, r, w):
    y, total = OPS.add_rms_norm(x, r, w)
    return *OPS.quantize_int8(y.flatten(0, 1), 0), total * 2


def modulated(x, r, w):
    texts = "v0=add(acc0,x0);ret v0", "v0=mul(acc0,x1);ret v0"
    y, total = OPS.fused_norm(x, [r, w], "tr", *texts, True, 1e-5, True, x.dtype)
    return *OPS.quantize_fp8(y, 32, FLOAT8), total


def read_twice(x, r, w):
    y = OPS.rms_norm(x, w)
    return *OPS.quantize_fp8(y, 0, FLOAT8), y + 1


def read_before(x, r, w):
    y, total = OPS.add_rms_norm(x, r, w)
    return *OPS.quantize_fp8(y * 2, 0, FLOAT8), total


FUSED = {form.__name__: form for form in (rms, rows, of_sum, modulated)}
APART = {form.__name__: form for form in (read_twice, read_before)}


def compiled(light, form, generator):
    x, r = (torch.randn(3, 5, 256, generator=generator).to(BF16) for _ in range(2))
    w = torch.randn(256, generator=generator).to(BF16)
    got, report = light(form, x, r, w)
    return got, form(x, r, w), [row.what for row in report.replaced("norm")]


@pytest.mark.parametrize("form", FUSED)
def test_becomes_one_kernel(form, light, generator):
    got, want, replaced = compiled(light, FUSED[form], generator)
    assert sum("tile.fused_norm_quantize([..., 256]" in what for what in replaced) == 1
    for each, expected in zip(got, want, strict=True):
        assert each.dtype == expected.dtype and each.shape == expected.shape
        off = (each.float() - expected.float()).abs()
        if each.dtype == torch.int8 or each.dtype == FLOAT8:
            # A norm without a rounding between may cross a number's middle, and so may its row's scale: two steps of
            # the format, of few numbers.
            step = 1.0 if each.dtype == torch.int8 else expected.float().abs() * 2.0**-3 + 2.0**-6
            assert (off <= 2 * step).all() and (off > 0.01 * step).float().mean() < 0.3
        else:
            assert (off <= expected.float().abs() * 2.0**-6).all()  # scales and sums: roundings to bfloat16


@pytest.mark.parametrize("form", APART)
def test_stays_apart_where_something_else_reads_the_norm(form, light, generator):
    got, want, replaced = compiled(light, APART[form], generator)
    assert not any("quantize" in what for what in replaced)
    for each, expected in zip(got, want, strict=True):
        torch.testing.assert_close(each.float(), expected.float(), rtol=0.13, atol=0.02)


def halves(x):
    gate, up = x.chunk(2, -1)
    return OPS.quantize_fp8(F.silu(gate) * up, 128, FLOAT8)


def turned(x):
    gate, up = x.unflatten(-1, (2, -1)).unbind(-2)
    return OPS.quantize_int8((up * (gate * torch.sigmoid(gate))).flatten(0, 1), 0)


def read_again(x):
    gate, up = x.chunk(2, -1)
    y = F.silu(gate) * up
    return *OPS.quantize_fp8(y, 128, FLOAT8), y + 1


def of_sum_of_both(x):
    gate, up = x.chunk(2, -1)
    return OPS.quantize_fp8(F.silu(gate) + up, 128, FLOAT8)


@pytest.mark.parametrize(("form", "count"), [(halves, 1), (turned, 1), (read_again, 0), (of_sum_of_both, 0)])
def test_swiglu(form, count, light, generator):
    x = torch.randn(3, 5, 512, generator=generator)
    got, report = light(form, x)
    replaced = [row.what for row in report.replaced("norm")]
    assert sum("tile.silu_mul_quantize([..., 256]" in what for what in replaced) == count
    for each, expected in zip(got, form(x), strict=True):
        assert each.dtype == expected.dtype and each.shape == expected.shape
        off = (each.float() - expected.float()).abs()
        step = 1.0 if each.dtype == torch.int8 else expected.float().abs() * 2.0**-3 + 2.0**-9
        assert (off <= step).all() and (off > 0.01 * step).float().mean() < 0.02  # either side of a middle
