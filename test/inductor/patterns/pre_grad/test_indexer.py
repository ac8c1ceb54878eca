# SPDX-License-Identifier: Apache-2.0
"""Explain says why indexers of sparse latent attention stay."""

import pytest
import torch

import torch_tile


def rows_of(model, *inputs):
    torch._dynamo.reset()
    rows = torch_tile.explain(model, *inputs, options={"families": ("mla",)}).rows
    return [row for row in rows if "indexer" in row.reason]


def written_out(q, k, weights, mask):
    scores = (torch.einsum("bshd,btd->bsht", q, k) * 0.25).relu()
    total = (scores * weights.unsqueeze(-1)).sum(2)
    return total.masked_fill(~mask, float("-inf")).topk(3, dim=-1)[1]


def test_an_indexer_written_out():
    q, k, weights = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 5, 4)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    (row,) = rows_of(written_out, q, k, weights, mask)
    assert row.status == "missed" and "tile.lightning_index" in row.reason and "mla_sparse" in row.fix
    # What the operator would have listed, by the call that the row advises.
    listed = torch.ops.tile.lightning_index(q, k, weights * 0.25, 3)
    assert torch.equal(listed.long().sort(-1)[0], written_out(q, k, weights, mask).sort(-1)[0])


def test_other_choices_have_no_row():
    x = torch.randn(2, 5, 9)
    assert not rows_of(lambda x: x.relu().topk(3, dim=-1)[1], x)
    assert not rows_of(lambda x: (x @ x.mT).relu().topk(3, dim=-1)[1], x)
    assert not rows_of(
        lambda q, k: (q @ k.mT).sum(1).topk(3, dim=-1)[1], torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
    )


def test_the_indexer_of_transformers():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("transformers has no DeepSeek-V3.2")
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    sizes = {"hidden_size": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8}
    config = transformers.DeepseekV32Config(**sizes, index_topk=5, index_n_heads=2, index_head_dim=16)
    indexer = DeepseekV32Indexer(config, 0).eval()
    turn = torch.randn(1, 7, 8), torch.randn(1, 7, 8)
    mask = torch.ones(1, 7, 7, dtype=torch.bool).tril()
    (row,) = rows_of(indexer, torch.randn(1, 7, 32), torch.randn(1, 7, 24), turn, mask, torch.arange(7)[None])
    assert row.status == "missed"
