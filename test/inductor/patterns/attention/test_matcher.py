# SPDX-License-Identifier: Apache-2.0
"""What counts as near an attention, and is reported; a softmax elsewhere is nobody's miss."""

import pytest
import torch


def router(x, w):
    scores, chosen = torch.softmax(x @ w, -1).topk(2)
    return scores / scores.sum(-1, keepdim=True), chosen


def classifier(x, w):
    return torch.softmax(x @ w, -1) * 2


def weights_returned_too(x, w):
    p = torch.softmax(x @ w, -1)
    return p @ w.mT, p


def changed_on_the_way(x, w):
    return (torch.softmax(x @ w, -1) ** 2) @ w.mT


@pytest.mark.parametrize(
    ("form", "reason"),
    [(router, ""), (classifier, ""), (weights_returned_too, "more than once"), (changed_on_the_way, "aten.pow")],
)
def test_only_probabilities_on_their_way_to_a_product_are_near(form, reason, agrees, generator):
    x, w = torch.randn(5, 8, generator=generator), torch.randn(8, 6, generator=generator)
    _, report = agrees(form, x, w)
    assert not report.replaced("attention")
    misses = report.missed("attention")
    assert [reason in r.reason for r in misses] == ([True] if reason else []), report
