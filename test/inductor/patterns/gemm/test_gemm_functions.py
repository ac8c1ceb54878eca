# SPDX-License-Identifier: Apache-2.0
"""Each function of the table behind a linear layer is taken into the layer's kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tile.kernels.epilogue.functions import FUNCTIONS, bind
from torch_tile.kernels.epilogue.program import evaluate


@pytest.fixture
def fuses(agrees, generator):
    """`fuses(f)`: `f` of a linear layer is one kernel with an epilogue that says it all; returns the epilogue."""

    def check(f, dtype=torch.float32):
        layer = nn.Linear(24, 17, dtype=dtype).requires_grad_(False)
        x = torch.randn(2, 5, 24, generator=generator, dtype=dtype) * 4
        _, report = agrees(lambda x: f(layer(x)), x)
        assert not report.missed(), str(report)
        (row,) = report.replaced("gemm")
        text = row.what.removeprefix("tile.gemm(").removesuffix(")")
        said = evaluate(text, [(x @ layer.weight.mT).double()], [layer.bias.double()])
        torch.testing.assert_close(said, f(layer(x).double()), rtol=1e-4, atol=1e-4)
        return text

    return check


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_linear_with_each_function(name, fuses):
    row = FUNCTIONS[name]

    def f(h):
        h = h.abs() + 0.1 if row.singular else h
        return bind(row.torch, torch)(h, *(h.new_full((), 0.5 + i) for i in range(row.arity - 1)))

    text = fuses(f)
    if row.written:
        assert f"={name}(" in text


@pytest.mark.parametrize(
    "f",
    [
        lambda h: F.softplus(h, 2.0, 5.0),
        lambda h: F.elu(h, 0.5),
        lambda h: F.celu(h, 2.0),
        F.selu,
        F.leaky_relu,
        lambda h: F.leaky_relu(h, 0.2),
        lambda h: F.prelu(h, h.new_full((1,), 0.3)),
        F.relu6,
        lambda h: F.hardtanh(h, -0.5, 2.0),
        F.softsign,
        F.tanhshrink,
        lambda h: torch.where(h.isnan(), 0.0, h),
        lambda h: torch.sub(h, h.sigmoid(), alpha=3),
        lambda h: h.clamp(max=1.5),
        lambda h: (h > 0.5).to(h.dtype) * h,
        lambda h: torch.where((h > -1) & (h < 1), h, 0.0),
        lambda h: torch.where((h < -1) | ~(h < 1), h, 0.0),
        lambda h: torch.where(torch.logical_or(h.relu(), h < -2), 1.0, h),
        lambda h: torch.where(torch.logical_and(h.relu(), h.floor()).logical_not(), 1.0, h),
    ],
)
def test_linear_with_what_is_made_of_functions(f, fuses):
    fuses(f)
