# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
import torch.nn.functional as F

from torch_tile.kernels.attention import reference


def by_hand(q, k, v, mask, causal, scale, window, q_offset):
    """One query at a time, over lists of the keys it sees."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    full = None if mask is None else mask.broadcast_to(batch, heads, q_len, kv_len)
    out = torch.zeros(batch, heads, q_len, v_dim, dtype=q.dtype)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for i in range(q_len):
                seen = [
                    j
                    for j in range(kv_len)
                    if not (causal and j > i + q_offset)
                    and not (window and j <= i + q_offset - window)
                    and not (full is not None and full.dtype == torch.bool and not full[b, h, i, j])
                ]
                scores = [float(q[b, h, i] @ k[b, g, j]) * scale for j in seen]
                if full is not None and full.dtype != torch.bool:
                    scores = [s + float(full[b, h, i, j]) for s, j in zip(scores, seen, strict=True)]
                total = sum(math.exp(s) for s in scores)
                if total:
                    lse[b, h, i] = math.log(total)
                    out[b, h, i] = sum(math.exp(s) / total * v[b, g, j] for s, j in zip(scores, seen, strict=True))
    return out, lse


@pytest.mark.parametrize("seed", range(24))
def test_reference_is_the_definition(seed):
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    def rand(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    batch, kv_heads, groups = pick(1, 2), pick(1, 2), pick(1, 2, 3)
    q_len, kv_len, d, dv = pick(1, 3, 5), pick(1, 4, 7), pick(1, 3, 8), pick(2, 5)
    q, k, v = (
        rand(batch, kv_heads * groups, q_len, d),
        rand(batch, kv_heads, kv_len, d),
        rand(batch, kv_heads, kv_len, dv),
    )
    mask = pick(None, "bool", "row", "float")
    if mask == "bool":
        mask = torch.rand(batch, 1, q_len, kv_len, generator=g) > 0.5
    elif mask == "row":
        mask = torch.rand(kv_len, generator=g) > 0.5
    elif mask == "float":
        mask = rand(kv_heads * groups, q_len, kv_len).masked_fill(
            torch.rand(q_len, kv_len, generator=g) > 0.7, -math.inf
        )
    options = (mask, pick(False, True), pick(None, 0.3), pick(0, 0, 1, 3), pick(0, kv_len - q_len, -2, 4))
    for got, want in zip(reference(q, k, v, *options), by_hand(q, k, v, *options), strict=True):
        torch.testing.assert_close(got, want)


def test_reference_is_torchs_sdpa():
    q, k, v = (torch.randn(2, 4, n, 16, dtype=torch.float64) for n in (9, 9, 9))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(reference(q, k, v, causal=True)[0], want)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty(shape):
    batch, heads, q_len, d = shape
    q, k, v = torch.randn(shape), torch.randn(batch, heads, 5, d), torch.randn(batch, heads, 5, 6)
    out, lse = reference(q, k, v)
    assert out.shape == (batch, heads, q_len, 6) and lse.shape == (batch, heads, q_len)
    if d == 0:  # all scores are zero
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


def test_no_keys_give_zero():
    out, lse = reference(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 5))
    assert out.shape == (1, 2, 3, 5) and not out.any() and lse.isneginf().all()
