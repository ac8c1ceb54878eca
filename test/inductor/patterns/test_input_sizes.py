# SPDX-License-Identifier: Apache-2.0
"""A size read off a tensor that is replaced does not keep what computed it."""

import torch


def test_a_replaced_product_goes_away_though_its_size_is_read(agrees, generator):
    def f(q, k, v):
        p = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", p, v)

    q, k, v = (torch.randn(n, generator=generator) for n in ((5, 5, 5, 8), (5, 5, 7, 8), (5, 5, 7, 3)))
    _, report = agrees(f, q, k, v, dynamic=True)
    assert len(report.replaced("attention")) == 1
    assert not report.replaced("gemm"), report
