# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_tile.kernels.attention.arguments import empty_beside, order_of, placed_beside


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_lies_in_memory_as_q_does(order):
    q = torch.empty(*((2, 3, 5)[d] for d in order), 8).permute(*(order.index(d) for d in range(3)), 3)
    out = empty_beside(q, 6)
    assert out.shape == (2, 3, 5, 6)
    assert order_of(q.stride()) == order_of(out.stride()) == [*order, 3]
    assert out.permute(*order, 3).is_contiguous()


def test_is_where_torch_puts_its_own():
    q = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert empty_beside(q, 8).stride() == F.scaled_dot_product_attention(q, q, q).stride()


def test_gaps_and_a_turned_last_dimension_do_not_matter():
    wide = torch.empty(2, 5, 3, 3, 8)[:, :, 1].transpose(1, 2)  # q of a packed [B, S, (q, k, v), H, D]
    assert empty_beside(wide, 8).stride() == (120, 8, 24, 1)
    assert empty_beside(torch.empty(2, 3, 8, 5).mT, 4).is_contiguous()


def test_equal_strides_stay_in_order():
    assert order_of((4, 4, 4)) == [0, 1, 2]
    assert order_of((0, 8, 8)) == [1, 2, 0]
    assert empty_beside(torch.empty(2, 1, 3, 8).transpose(1, 2), 8).is_contiguous()


def test_values_are_placed_and_cast():
    q = torch.empty(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
    values = torch.randn(2, 3, 5, 4)
    out = placed_beside(values, q)
    assert out.stride() == empty_beside(q, 4).stride()
    torch.testing.assert_close(out, values.bfloat16())


def test_symbolic_sizes():
    """As for real ones of the same order, without a guard on a length that has no value."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        length = env.create_unbacked_symint()
        torch._check(length >= 0)
        out = empty_beside(torch.empty(2, length, 3, 8).transpose(1, 2), 6)
        assert out.transpose(1, 2).is_contiguous()
        assert empty_beside(torch.empty(2, 3, length, 8), 6).is_contiguous()
    assert not env.guards
