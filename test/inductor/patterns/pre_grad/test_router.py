# SPDX-License-Identifier: Apache-2.0
"""Routers as transformers writes them become tile.route; what means something else stays."""

import pytest
import torch
from torch import nn

import torch_tile
from torch_tile.inductor.dry_run import dry_run

transformers = pytest.importorskip("transformers")

TILE = {"select": "tile", "families": ("route",)}


def mixtral():
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    return MixtralTopKRouter(transformers.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=3))


def qwen3_moe(normalise=True):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sizes = {"hidden_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": normalise}
    return Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**sizes))


def deepseek_v3():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"hidden_size": 16, "n_routed_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 3}
    router = DeepseekV3TopkRouter(transformers.DeepseekV3Config(**sizes, n_group=4, topk_group=2))
    nn.init.uniform_(router.e_score_correction_bias)
    return router


MODELS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "not normalised": lambda: qwen3_moe(False), "v3": deepseek_v3}


def sorted_by_expert(result):
    """The weights of each token in the order of its experts, and these."""
    _, weights, experts = result
    order = experts.argsort(-1)
    return weights.gather(-1, order), experts.gather(-1, order)


def rows_of(model, x, options=TILE):
    torch._dynamo.reset()
    return [row for row in torch_tile.explain(model, x, options=options).rows if row.family == "route"]


@pytest.mark.parametrize("name", MODELS)
def test_a_router_of_transformers(name, seed):
    torch.manual_seed(seed)
    router = MODELS[name]()
    nn.init.normal_(router.weight)
    x, twin = torch.randn(11, 16, requires_grad=True), torch.randn(11, 16)
    (row,) = rows_of(router, twin)
    assert row.status == "replaced" and "tile.route" in row.what, row
    torch._dynamo.reset()
    compiled = torch.compile(router, backend=dry_run, options=TILE)
    got, want = sorted_by_expert(compiled(x)), sorted_by_expert(router(x))
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(got[1], want[1])
    grad = torch.randn_like(want[0])
    leaves = x, router.weight
    found, wanted = (torch.autograd.grad(y[0], leaves, grad) for y in (got, want))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def changed(x, k=2, power=None, dim=-1, used=False):
    scores = torch.softmax(x, dim)
    top, experts = torch.topk(scores, k, dim=-1)
    total = top.sum(-1, keepdim=True)
    weights = top / (total if power is None else total**power)
    return x, weights + top if used else weights, experts


@pytest.mark.parametrize("options", [{"power": 2.0}, {"used": True}, {"dim": 0}], ids=str)
def test_other_weights_stay(options):
    x = torch.randn(5, 8)
    rows = rows_of(lambda x: changed(x, **options), x)
    assert [row.status for row in rows] == ["missed"], rows
    assert [row.status for row in rows_of(changed, x)] == ["replaced"]


def test_scores_of_16_bits_and_other_topks_stay():
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    (row,) = rows_of(changed, x)
    assert row.status == "missed" and "bfloat16" in row.reason
    assert not rows_of(lambda x: torch.topk(x, 2), x)
    assert not rows_of(lambda x: torch.topk(torch.softmax(x.float(), -1).sum(-1), 2), x)


def test_routers_that_are_not_timed_are_kept():
    x = torch.randn(5, 8)
    (row,) = rows_of(changed, x, {"select": "fastest", "families": ("route",)})
    assert row.status == "kept" and "not timed" in row.reason
