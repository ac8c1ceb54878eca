# SPDX-License-Identifier: Apache-2.0
"""Operations and bytes are those that one counts by hand; what is not known stays unknown."""

import pytest
import torch

from torch_tile.inductor.graph.nodes import aten
from torch_tile.inductor.select import roofline
from torch_tile.inductor.select.roofline import PEAKS, Cost, cost_of, peak_of

tile = torch.ops.tile


def graph_of(target, *args, **kwargs):
    """A call on placeholders, its value that of the call on meta tensors."""
    graph = torch.fx.Graph()

    def take(value):
        if not isinstance(value, torch.Tensor):
            return [take(v) for v in value] if isinstance(value, list) else value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tuple(take(a) for a in args), kwargs)
    node.meta["val"] = target(*args, **kwargs)
    return node


def meta(*sizes, dtype=torch.bfloat16):
    return torch.empty(*sizes, dtype=dtype, device="meta")


def test_products():
    node = graph_of(aten.mm.default, meta(3, 5), meta(5, 7))
    assert cost_of([node]) == Cost(2 * 3 * 5 * 7, 2 * (15 + 35 + 21), torch.bfloat16)
    bias = meta(7)
    node = graph_of(aten.addmm.default, bias, meta(3, 5), meta(5, 7))
    assert cost_of([node]) == Cost(2 * 3 * 5 * 7, 2 * (15 + 35 + 21 + 7), torch.bfloat16)
    node = graph_of(
        tile.gemm.default,
        meta(2, 3, 5),
        [meta(2, 5, 7), meta(2, 5, 7)],
        [],
        "",
        "v0=mul(acc0,acc1);ret v0",
        torch.float32,
    )
    assert cost_of([node]) == Cost(2 * 2 * 2 * 3 * 5 * 7, 2 * (30 + 70 + 70) + 4 * 42, torch.bfloat16)
    words, scales = meta(7, 32, dtype=torch.uint8), meta(7, 1)
    args = meta(3, 64), [words], [scales], [], 4, False, 8, [], "", "", torch.bfloat16
    assert cost_of([graph_of(tile.dequant_gemm.default, *args)]) == Cost(
        2 * 3 * 64 * 7, 2 * 3 * 64 + 7 * 32 + 2 * 7 + 2 * 21, torch.bfloat16
    )


@pytest.mark.parametrize(
    ("causal", "window", "offset"), [(False, 0, 0), (True, 0, 0), (True, 0, 4), (True, 3, 4), (True, 2, 0)]
)
def test_attention_counts_what_a_mask_leaves(causal, window, offset):
    q, k, v = meta(2, 4, 5, 16), meta(2, 2, 9, 16), meta(2, 2, 9, 8)
    node = graph_of(tile.attention.default, q, k, v, None, causal, None, window, offset)
    i, j = torch.arange(5)[:, None] + offset, torch.arange(9)
    seen = ((j <= i) if causal else j == j) & (j > i - (window or 100))
    pairs = int(seen.expand(5, 9).sum())
    assert cost_of([node]).flops == 2 * 2 * 4 * pairs * (16 + 8)
    assert cost_of([node]).bytes == 2 * (q.numel() + k.numel() + v.numel() + 2 * 4 * 5 * 8)


def test_latent_attention_and_norms():
    node = graph_of(tile.mla_decode.default, meta(2, 1, 4, 32), meta(2, 1, 4, 8), meta(2, 9, 32), meta(2, 9, 8))
    assert cost_of([node]).flops == 2 * 2 * 4 * 9 * (32 + 8 + 32)
    node = graph_of(tile.add_rms_norm.default, meta(6, 32), meta(6, 32), meta(32))
    assert cost_of([node]) == Cost(0, 2 * (4 * 6 * 32 + 32), torch.bfloat16)


def test_repeated_dimensions_are_not_moved():
    node = graph_of(aten.mm.default, meta(1, 5).expand(3, 5), meta(5, 7))
    assert cost_of([node]).bytes == 2 * (5 + 35 + 21)


def test_the_unknown_stays_unknown(monkeypatch):
    assert cost_of([graph_of(aten.tanh.default, meta(3))]) is None
    assert cost_of([]) is None
    assert peak_of(torch.device("cpu")) is None and peak_of(None) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Unheard-of")
    assert peak_of(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_of(torch.device("cuda")) is roofline.PEAKS["NVIDIA H200"]


def test_peak():
    peak = PEAKS["NVIDIA H200"]
    wide, flat = Cost(10**15, 10**9, torch.bfloat16), Cost(10**9, 10**12, torch.bfloat16)
    assert peak.seconds(wide) == pytest.approx(1e15 / 989.4e12) and peak.limit(wide) == "arithmetic"
    assert peak.seconds(flat) == pytest.approx(1e12 / 4.8e12) and peak.limit(flat) == "memory"
    assert peak.seconds(Cost(10**9, 1, torch.int8)) is None
    assert peak.seconds(Cost(0, 48, torch.int8)) == pytest.approx(1e-11)
