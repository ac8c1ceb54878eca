# SPDX-License-Identifier: Apache-2.0
"""Rounding to float8: scales are exact, and values are within half a step of what they stand for."""

import math

import pytest
import torch

from torch_tile.kernels.norm.quantize import LARGEST, LEAST, quantize_fp8, reference, silu_mul_quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DIGITS = {E4M3: (4, -9), E5M2: (3, -16)}  # of a number, and the exponent of the least one


def spread(scales, group, columns):
    return scales.double().repeat_interleave(group or columns, -1)[..., :columns]


def check_rounding(x, group, dtype, values, scales):
    """From the definition, in float64."""
    columns, largest = x.shape[-1], LARGEST[dtype]
    for start in range(0, columns, group or columns):
        run = x[..., start : start + (group or columns)].double()
        want = run.abs().amax(-1).clamp_min(LEAST) / largest
        torch.testing.assert_close(scales[..., start // (group or columns)].double(), want, rtol=1e-6, atol=0)
    exact, (digits, least) = x.double() / spread(scales, group, columns), DIGITS[dtype]
    step = torch.maximum(exact.abs().log2().floor() - digits + 1, torch.tensor(float(least))).exp2()
    assert values.dtype == dtype and (values.double() - exact).abs().le(step * 0.51).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("group", [0, 16, 128])
def test_random_problems(group, dtype, rounds, problems):
    for _ in rounds(2):
        rows, columns = problems.size(20), problems.size(400)
        x = problems.tensor(rows, columns, dtype=problems.pick(torch.float32, torch.bfloat16, torch.float16))
        check_rounding(x, group, dtype, *quantize_fp8(x, group, dtype))


@pytest.mark.parametrize("group", [0, 128])
def test_aligned_and_long_rows(group, engine, problems):
    for columns in (256, 20000):
        x = problems.tensor(3, columns, dtype=torch.bfloat16).contiguous()
        check_rounding(x, group, E4M3, *quantize_fp8(x, group, E4M3))


def test_zeros_large_numbers_and_nan(engine):
    x = torch.tensor([[0.0] * 32, [1e38, -3e38] + [1.0] * 30, [math.nan] + [1.0] * 31, [1e-38] * 32])
    values, scales = quantize_fp8(x, 16, E4M3)
    assert values[0].float().eq(0).all() and scales[0].eq(LEAST / 448.0).all()
    assert values[1, :2].float().tolist() == [144.0, -448.0] and values[1, 2:16].float().eq(0).all()
    assert values[2, :16].float().isnan().all() and scales[2, 0].isnan() and scales[2, 1] == 1 / 448
    assert values[3].float().eq(0).all()


@pytest.mark.parametrize("shape", [(0, 7), (3, 1), (2, 0, 5), (2, 3, 130)])
def test_shapes(shape, engine):
    values, scales = quantize_fp8(torch.ones(shape, dtype=torch.float64), 128, E4M3)
    assert values.shape == shape and scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert values.float().eq(448).all()
    want = reference(torch.ones(shape, dtype=torch.float64), 128, E4M3)
    assert torch.equal(values.float(), want[0].float()) and torch.equal(scales, want[1])
    assert scales.stride() == want[1].stride()


@pytest.mark.parametrize(
    "shape", [(5, 300), (3, 7, 300), (2, 3, 4, 256), (300,), (1, 1, 300), (5, 128), (5, 1, 7)], ids=str
)
def test_scales_of_runs_lie_by_columns(shape, engine):
    """All rows are one dimension of them; a column begins at a multiple of 16 bytes."""
    rows = math.prod(shape[:-1])
    x = torch.randn(shape)
    for scales in (quantize_fp8(x, 128, E4M3)[1], silu_mul_quantize(x, x, 128, E4M3)[1]):
        if len(shape) > 1 and shape[-1] > 128:
            assert scales.stride(-1) == -(-rows // 4) * 4
            assert rows == 1 or scales.view(rows, -1).stride(0) == 1
        else:
            assert scales.stride() == torch.empty(scales.shape).stride()
        assert quantize_fp8(x, 0, E4M3)[1].is_contiguous()


@pytest.mark.parametrize("group", [0, 16, 128])
def test_silu_mul_random_problems(group, rounds, problems):
    """Against float64: of the rounded product, scales are exact and values within half a step, besides its rounding."""
    for _ in rounds(2):
        rows, columns = problems.size(20), problems.size(400)
        dtype, to = problems.pick(torch.float32, torch.bfloat16, torch.float16), problems.pick(E4M3, E5M2)
        gate, up = (problems.tensor(rows, columns, dtype=dtype) for _ in range(2))
        check_silu_mul(gate, up, group, to, *silu_mul_quantize(gate, up, group, to))


def check_silu_mul(gate, up, group, dtype, values, scales):
    """Values times scales are the product within the format's step and one rounding, and so are scales."""
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    columns, (digits, least) = exact.shape[-1], DIGITS[dtype]
    slack = torch.finfo(gate.dtype).eps + 2e-6
    for start in range(0, columns, group or columns):
        want = exact[..., start : start + (group or columns)].abs().amax(-1).clamp_min(LEAST) / LARGEST[dtype]
        found = scales[..., start // (group or columns)].double()
        torch.testing.assert_close(found, want, rtol=2 * slack, atol=0)
    wide = exact / spread(scales, group, columns)
    step = torch.maximum(wide.abs().log2().floor() - digits + 1, torch.tensor(float(least))).exp2()
    assert values.dtype == dtype and (values.double() - wide).abs().le(step * 0.51 + wide.abs() * slack).all()


@pytest.mark.parametrize("group", [0, 128])
def test_silu_mul_of_halves_and_long_rows(group, engine, problems):
    for columns in (256, 20000):
        gate, up = problems.tensor(3, 2 * columns, dtype=torch.bfloat16).contiguous().chunk(2, -1)
        check_silu_mul(gate, up, group, E4M3, *silu_mul_quantize(gate, up, group, E4M3))
