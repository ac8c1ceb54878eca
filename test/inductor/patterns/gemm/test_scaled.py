# SPDX-License-Identifier: Apache-2.0
"""Products of float8 matrices by torch's functions become one kernel with their epilogue."""

import pytest
import torch
import torch.nn.functional as F

M, N, K = 16, 32, 256
BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn


class Operands(torch.nn.Module):
    """Operands and scales, and what a form makes of them."""

    def __init__(self, generator, form) -> None:
        super().__init__()
        self.form = form

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.register_buffer("weight", random(N, K).to(FLOAT8))
        self.register_buffer("bias", random(N).to(BF16))
        self.register_buffer("one", torch.tensor(0.5))
        self.register_buffer("rows", random(M, 1).abs())
        self.register_buffer("columns", random(1, N).abs())

    def forward(self, x):
        return self.form(x.to(FLOAT8), self.weight.t(), self)


def rowwise(a, b, w):
    recipe = F.ScalingType.RowWise
    return F.scaled_mm(a, b, w.rows, recipe, w.columns, recipe, output_dtype=torch.float32)


def scaled_mm(a, b, *scales, bias=None, out_dtype=BF16):
    return torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=out_dtype)


FORMS = {
    "a matrix": (lambda a, b, w: scaled_mm(a, b, w.one, w.one), "scales [1, 1] by [1, 1], ret acc0"),
    "rows": (lambda a, b, w: scaled_mm(a, b, w.rows, w.columns), f"scales [{M}, 1] by [1, {N}], ret acc0"),
    "bias and silu": (
        lambda a, b, w: F.silu(scaled_mm(a, b, w.rows, w.columns, bias=w.bias)),
        "biased=add(acc0,x0);v0=silu(biased);ret v0",
    ),
    "a residual": (
        lambda a, b, w: scaled_mm(a, b, w.one, w.one, bias=w.bias) + a[:, :N].to(BF16),
        "biased=add(acc0,x1);v0=add(biased,x0);ret v0",
    ),
    "recipes": (rowwise, f"scales [{M}, 1] by [1, {N}], ret acc0"),
}


@pytest.mark.parametrize("form", FORMS)
def test_becomes_one_kernel(form, light, generator):
    if form == "recipes" and not hasattr(F, "scaled_mm"):
        pytest.skip("this torch has no F.scaled_mm")
    function, what = FORMS[form]
    model = Operands(generator, function)
    x = torch.randn(M, K, generator=generator)
    try:
        want = model(x)
    except NotImplementedError:
        pytest.skip("this torch has F.scaled_mm for CUDA alone, and does not trace it")
    except RuntimeError as problem:
        assert "per-tensor" in str(problem)
        want = in_float(model, x, form)
    got, report = light(model, x)
    (row,) = report.replaced("scaled")
    assert what in row.what
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0.3)


def in_float(w, x, form):
    """A product by scales of rows, where oneDNN runs torch's own, which takes one scale alone."""
    rows = (x.to(FLOAT8).float() * w.rows) @ (w.weight.float().t() * w.columns)
    return {"rows": rows.to(BF16), "recipes": rows, "bias and silu": F.silu((rows + w.bias).to(BF16))}[form]


def test_a_float8_result_is_told(light, generator):
    model = Operands(generator, lambda a, b, w: scaled_mm(a, b, w.one, w.one, out_dtype=FLOAT8).to(BF16))
    _, report = light(model, torch.randn(M, K, generator=generator))
    assert not report.replaced("scaled")
    (miss,) = report.missed("scaled")
    assert "into torch.float8_e4m3fn" in miss.reason


class Experts(torch.nn.Module):
    """Groups of rows by a matrix each, with scales of rows and columns."""

    def __init__(self, generator) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(2, N, K, generator=generator).to(FLOAT8))
        self.register_buffer("rows", torch.rand(M, generator=generator) + 0.5)
        self.register_buffer("columns", torch.rand(2, N, generator=generator) + 0.5)

    def forward(self, x, ends):
        a, b = x.to(FLOAT8), self.weight.transpose(1, 2)
        return F.silu(torch._scaled_grouped_mm(a, b, self.rows, self.columns, offs=ends, out_dtype=BF16))


class Gradients(torch.nn.Module):
    """Groups of tokens, of which K counts all, with scales of rows and columns for each group."""

    def forward(self, grad, x, rows, columns, ends):
        a, b = grad.t().contiguous().to(FLOAT8), x.t().contiguous().to(FLOAT8)
        return torch._scaled_grouped_mm(a, b.t(), rows, columns, offs=ends, out_dtype=BF16)


def test_gradients_of_groups_become_one_kernel(light, generator):
    """torch has no kernel for CPUs to compare with."""
    if not hasattr(torch, "_scaled_grouped_mm"):
        pytest.skip("this torch has no _scaled_grouped_mm")
    ends = torch.tensor([16, 16, 48], dtype=torch.int32)
    grad, x = torch.randn(48, N, generator=generator), torch.randn(48, K, generator=generator)
    rows, columns = torch.rand(3 * N, generator=generator) + 0.5, torch.rand(3 * K, generator=generator) + 0.5
    got, report = light(Gradients(), grad, x, rows, columns, ends)
    (row,) = report.replaced("scaled")
    assert "tile.k_grouped_scaled_gemm(torch.float8_e4m3fn)" in row.what
    a, b = grad.to(FLOAT8).float(), x.to(FLOAT8).float()
    factors = rows.view(3, N, 1) * columns.view(3, 1, K)
    want = torch.stack([a[:16].T @ b[:16], torch.zeros(N, K), a[16:].T @ b[16:]]) * factors
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.3)


def test_groups_of_rows_become_one_kernel(light, generator):
    """torch has no kernel for CPUs to compare with."""
    if not hasattr(torch, "_scaled_grouped_mm"):
        pytest.skip("this torch has no _scaled_grouped_mm")
    model, ends = Experts(generator), torch.tensor([5, M], dtype=torch.int32)
    x = torch.randn(M, K, generator=generator)
    got, report = light(model, x, ends)
    (row,) = report.replaced("scaled")
    assert "tile.grouped_scaled_gemm(torch.float8_e4m3fn, v0=silu(acc0);ret v0)" in row.what
    a = x.to(FLOAT8).float() * model.rows[:, None]
    b = model.weight.float() * model.columns[..., None]
    want = F.silu(torch.cat([a[:5] @ b[0].T, a[5:] @ b[1].T]))
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.3)
