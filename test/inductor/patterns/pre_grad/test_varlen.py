# SPDX-License-Identifier: Apache-2.0
"""torch's varlen_attn becomes a tile op, with its gradients and over pages; what has no kernel is named."""

import functools
import inspect

import pytest
import torch

from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.report.rows import collect

varlen = pytest.importorskip("torch.nn.attention.varlen")
GIVEN = inspect.signature(varlen.varlen_attn).parameters
GROUPED = {"enable_gqa": True} if "enable_gqa" in GIVEN else {}  # torch 2.11 has no such argument
TILE = functools.partial(tile, options={"select": "tile"})


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


def compiled(function, *args):
    torch._dynamo.reset()
    with no_graph_caches(), collect() as report:
        result = torch.compile(function, backend=TILE)(*args)
    return result, report.select("attention")


@pytest.mark.parametrize(
    ("window", "options"),
    [((-1, -1), {}), ((-1, 0), {"causal": True}), ((3, 0), {"causal": True, "window": 4}), ((3, -1), {"window": 4})],
)
def test_a_call_and_its_gradients(window, options):
    keys = 2 if GROUPED else 4
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((9, 4), (12, keys), (12, keys)))
    given = starts(0, 3, 9), starts(0, 5, 12), 6, 7

    def model(q, k, v, cu_q, cu_k):
        out = varlen.varlen_attn(q * 1.5, k, v, cu_q, cu_k, 6, 7, scale=0.3, window_size=window, **GROUPED)
        return out.sin()

    out, rows = compiled(model, q, k, v, *given[:2])
    found = [(row.status, row.what.split("(")[0]) for row in rows]
    assert found == [("replaced", "tile.attention_varlen_lse")], rows
    want = torch.ops.tile.attention_varlen(q * 1.5, k, v, *given, scale=0.3, **options).sin()
    torch.testing.assert_close(out, want)
    upstream = torch.randn_like(out)
    for got, exact in zip(*(torch.autograd.grad(x, (q, k, v), upstream) for x in (out, want)), strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.skipif("block_table" not in GIVEN, reason="this torch has no pages in varlen_attn")
def test_pages():
    q, k, v = torch.randn(4, 4, 16), torch.randn(5, 16, 2, 16), torch.randn(5, 16, 2, 16)
    given = starts(0, 1, 4), starts(20, 3), torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)

    def model(q, k, v, cu, used, pages):
        return varlen.varlen_attn(
            q, k, v, cu, None, 3, 32, window_size=(-1, 0), enable_gqa=True, seqused_k=used, block_table=pages,
            return_aux=varlen.AuxRequest(lse=True),
        )  # fmt: skip

    with torch.no_grad():
        found, rows = compiled(model, q, k, v, *given)
    assert [row.what.split("(")[0] for row in rows] == ["tile.attention_paged_lse"]
    want = torch.ops.tile.attention_paged_lse(q, k, v, given[2], given[1], given[0], 3)
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got, exact)
