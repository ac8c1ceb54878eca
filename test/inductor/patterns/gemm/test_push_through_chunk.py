# SPDX-License-Identifier: Apache-2.0
"""Steps between a product and the columns that are read of it."""

import pytest
import torch
import torch.nn.functional as F

STEPS = {  # name: the step, given the product [2, 5, 18], one number for each row, and a row
    "mask": lambda y, rows, row: y.masked_fill(rows > 0, 0.0),
    "negated mask": lambda y, rows, row: torch.where(rows > 0, y, -1.0),
    "mask and full": lambda y, rows, row: torch.where(rows > 0, torch.full_like(y, 2.0), y),
    "scale of rows": lambda y, rows, row: y * rows,
    "row": lambda y, rows, row: y + row,
    "clamp": lambda y, rows, row: y.clamp(-1.0, 1.0),
    "mask and clamp": lambda y, rows, row: y.clamp(-1.0).masked_fill(rows > 0, 0.0),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("step", STEPS)
def test_is_computed_of_the_columns(step, dynamic, agrees, generator):
    x, rows, *weights = (torch.randn(s, generator=generator) for s in ((2, 5, 7), (2, 5, 1), (18, 7), (18,)))
    w, row = map(torch.nn.Parameter, weights)

    def mlp(x, rows):
        gate, up = STEPS[step](F.linear(x, w), rows, row).chunk(2, -1)
        return F.silu(gate) * up

    _, report = agrees(mlp, x, rows, dynamic=dynamic)
    (found,) = report.replaced("gemm")
    assert "2 products" in found.what


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.chunk(3, -1),  # nothing brings them together
        lambda y: (y[..., :9] * y[..., 9:], y),  # read whole, too
    ],
    ids=["apart", "whole"],
)
def test_stays_behind_the_whole_product(read, agrees, generator):
    """Where one kernel could not make the columns, it makes the step."""
    x, w = torch.randn(2, 5, 7, generator=generator), torch.randn(18, 7, generator=generator)
    _, report = agrees(lambda x, w: read(F.silu(F.linear(x, w))), x, w)
    (found,) = report.replaced("gemm")
    assert found.what == "tile.gemm(v0=silu(acc0);ret v0)"


def test_between_products_that_are_apart(agrees, generator):
    """Two weights, and something pointwise on both before they meet."""
    x, gate, up = (torch.randn(s, generator=generator) for s in ((2, 5, 7), (9, 7), (9, 7)))
    _, report = agrees(
        lambda x, g, u: F.silu(F.linear(x, g).clamp(max=1)) * (F.linear(x, u).clamp(-1, 1) + 1), x, gate, up
    )
    (found,) = report.replaced("gemm")
    assert "2 products" in found.what


@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm])
def test_masks_behind_norms(norm, agrees, generator):
    x, w, mask = torch.randn(2, 5, 24, generator=generator), torch.randn(24), torch.rand(2, 5, 1) > 0.5
    _, report = agrees(lambda x, w, mask: norm(x, (24,), w).masked_fill(mask, 0.0), x, w, mask)
    assert "what follows" in report.replaced("norm")[0].what
