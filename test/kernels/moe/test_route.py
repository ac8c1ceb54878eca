# SPDX-License-Identifier: Apache-2.0
"""The choice of experts, on all engines, against plain torch."""

import pytest
import torch

from torch_tile.kernels.moe import route

KINDS = [("softmax", 1, 1), ("sigmoid", 1, 1), ("sigmoid", 4, 2), ("softmax", 3, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_routes(dtype, rounds, engine, problems):
    for _ in rounds(6):
        score, groups, top_groups = problems.pick(*KINDS)
        n = groups * problems.size(9 if groups > 1 else 40)
        k = min(n // groups * top_groups, problems.size(8))
        logits = problems.tensor(problems.size(9), problems.size(5), n, dtype=dtype)
        bias = problems.pick(None, problems.tensor(n, layout="dense"))
        given = k, score, groups, top_groups, problems.pick(1, 2), problems.pick(True, False), 2.5
        weights, experts = route.route(logits, bias, *given)
        want, chosen = route.reference(logits, bias, *given)
        what = f"{list(logits.shape)} {given} {bias is not None}"
        exact, _ = route.reference(logits.double(), bias, *given)
        assert torch.equal(experts, chosen), what  # scores of random numbers hardly meet within rounding
        torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights.double(), exact, rtol=1e-4, atol=1e-6)


def test_equal_scores_and_no_numbers_give_experts_that_exist(engine):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [torch.nan] * 4, [-torch.inf, 0.0, -torch.inf, -torch.inf]])
    weights, experts = route.route(logits, None, 3)
    assert experts[0].tolist() == [1, 2, 0] and weights[1].isnan().all()
    assert ((experts >= 0) & (experts < 4)).all() and experts[2, 0] == 1
