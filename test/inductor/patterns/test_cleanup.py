# SPDX-License-Identifier: Apache-2.0
"""What torch.export asserts of dtypes stands in the way of no match."""

import pytest
import torch

from torch_tile.inductor.graph.nodes import aten


def attend(q, k, v):
    return torch.softmax((q @ k.mT).float() * 0.25, -1).to(q.dtype) @ v


def norm(q, k, v):
    x = q.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(q.dtype)


@pytest.mark.parametrize(("form", "family"), [(attend, "attention"), (norm, "norm")])
def test_exported_models(form, family, agrees):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return form(q, k, v)

    args = tuple(torch.randn(2, 3, 5, 16) for _ in "qkv")
    exported = torch.export.export(Model(), args)
    assert exported.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)
    _, report = agrees(exported.module(), *args)
    assert len(report.replaced(family)) == 1, report


def test_a_replaced_product_goes_away_though_its_size_is_read(agrees, generator):
    def f(q, k, v):
        p = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", p, v)

    q, k, v = (torch.randn(n, generator=generator) for n in ((5, 5, 5, 8), (5, 5, 7, 8), (5, 5, 7, 3)))
    _, report = agrees(f, q, k, v, dynamic=True)
    assert len(report.replaced("attention")) == 1
    assert not report.replaced("gemm"), report
