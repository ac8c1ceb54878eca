# SPDX-License-Identifier: Apache-2.0
"""Gradients that autograd takes of plain torch."""

import torch

from torch_tile.kernels.norm.args import SoftmaxArgs
from torch_tile.ops.recomputed import by_autograd


def test_an_operator_of_one_result(seed):
    rule = by_autograd("norm.softmax", "reference")

    def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.softmax(x, dim)

    op = torch.library.custom_op("tile_test::of_one_result", softmax, mutates_args=())
    op.register_autograd(
        lambda *given: rule["backward"](*given)[:2],
        setup_context=lambda ctx, inputs, output: rule["setup_context"](ctx, SoftmaxArgs(*inputs), output),
    )
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: op(x, 1), (x,))
    assert torch.autograd.gradgradcheck(lambda x: op(x, 1), (x,))
