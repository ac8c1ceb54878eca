# SPDX-License-Identifier: Apache-2.0
"""Attention of jagged tensors becomes a tile op with its gradients; what has no kernel is named."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend

from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.patterns.pre_grad.nested import attend_jagged
from torch_tile.inductor.report.rows import collect

LENGTHS = (3, 7, 1)


def jagged(heads, width, offsets=None, lengths=LENGTHS):
    values = torch.randn(sum(lengths), heads, width)
    offsets = torch.tensor([0, *lengths]).cumsum(0) if offsets is None else offsets
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths))


def by_sequence(q, k, v, **options):
    """Each sequence alone, `[T, H, Dv]`."""
    parts = zip(*(x.transpose(1, 2).unbind() for x in (q, k, v)), strict=True)
    alone = (F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), **options) for part in parts)
    return torch.cat([x.transpose(0, 1) for x in alone])


@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(causal, seed):
    q = jagged(4, 16)
    k, v = jagged(2, 16, q.offsets()), jagged(2, 24, q.offsets())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    found = attend_jagged(*(x.transpose(1, 2) for x in (q, k, v)), causal, 0.3)
    assert found.shape == (*q.transpose(1, 2).shape[:3], 24)
    wanted = by_sequence(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2).values(), wanted)
    upstream = torch.randn_like(wanted)
    ours = torch.autograd.grad(found.transpose(1, 2).values(), (q, k, v), upstream)
    for got, exact in zip(ours, torch.autograd.grad(wanted, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(got.values(), exact.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, None), ({"is_causal": True}, None), ({"scale": 0.5}, None), ({"dropout_p": 0.5}, "a mask, or dropout")],
)
def test_capture(options, reason, seed, monkeypatch):
    """torch itself has no kernel for graphs of jagged tensors on the CPU; the tracer is told that it has GPUs' one."""
    monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *args: SDPBackend.FLASH_ATTENTION)
    x = jagged(2, 48)

    def model(x):
        q, k, v = (part.transpose(1, 2) for part in x.chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).values()

    torch._dynamo.reset()
    backend = functools.partial(dry_run, options={"select": "tile"})
    with collect() as report, torch.no_grad():
        fast = torch.compile(model, backend=backend, fullgraph=True)
        if reason is None:
            wanted = by_sequence(*(part.transpose(1, 2) for part in x.chunk(3, dim=-1)), **options)
            torch.testing.assert_close(fast(x), wanted)
        else:
            with pytest.raises(Exception, match="_flash_attention_forward"):
                fast(x)
    rows = report.select("attention")
    if reason is None:
        assert [(row.status, row.what.split("(")[0]) for row in rows] == [("replaced", "tile.attention_varlen")], rows
    else:
        assert [row.status for row in rows][:1] == ["missed"] and reason in rows[0].reason, rows
