# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.nn import MLAAttention

SIZES = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def rope(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(1, length, 4).repeat(1, 1, 2) * 6
    return angle.cos(), angle.sin()


def stock_layer(rank: int | None, bias: bool, interleave: bool):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = transformers.DeepseekV3Config(
        hidden_size=40, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=rank, attention_bias=bias,
        rope_interleave=interleave, **SIZES,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    stock = DeepseekV3Attention(config, 0).eval()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return stock.double(), transformers.DynamicCache


@pytest.mark.parametrize(("rank", "bias", "interleave"), [(24, False, True), (None, False, True), (24, True, False)])
def test_agrees_with_transformers_in_prefill_and_decoding(
    rank: int | None, bias: bool, interleave: bool, seed: int, monkeypatch
) -> None:
    stock, cache_class = stock_layer(rank, bias, interleave)
    ours = MLAAttention(40, 4, q_lora_rank=rank, bias=bias, rope_interleave=interleave, **SIZES).eval()
    ours.load_state_dict(stock.state_dict())
    ways = []
    absorbed, expanded = MLAAttention.absorbed, MLAAttention.expanded
    monkeypatch.setattr(MLAAttention, "absorbed", lambda *args: ways.append("absorbed") or absorbed(*args))
    monkeypatch.setattr(MLAAttention, "expanded", lambda *args: ways.append("expanded") or expanded(*args))
    theirs, mine = cache_class(), cache_class()
    for length, name in ((40, "cache"), (1, "past_key_values"), (3, "cache")):
        x, position = torch.randn(2, length, 40), rope(length)
        past = theirs.get_seq_length()
        visible = torch.ones(length, past + length, dtype=torch.bool).tril(past)[None, None]
        with torch.no_grad():
            out = ours(x, position, None, **{name: mine})[0]
            wanted = stock(x.double(), tuple(t.double() for t in position), visible, theirs)[0]
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    assert ways == ["expanded", "absorbed", "absorbed"]


def test_a_mask_is_followed(seed: int) -> None:
    layer, x, position = MLAAttention(40, 4, q_lora_rank=None, **SIZES), torch.randn(2, 6, 40), rope(6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        out = layer(x, position)[0]
        torch.testing.assert_close(layer(x, position, causal)[0], out)
        padded = causal.expand(2, 1, 6, 6).clone()
        padded[1, :, :, :2] = False
        other = layer(x, position, padded)[0]
    torch.testing.assert_close(other[0], out[0])
    assert not torch.allclose(other[1, 3:], out[1, 3:])


def test_absorbing_pays_for_few_tokens_only() -> None:
    layer = MLAAttention(64, 2, q_lora_rank=None)  # DeepSeek-V3's head sizes
    assert layer.absorbing_pays(1) and layer.absorbing_pays(8) and not layer.absorbing_pays(512)


def test_both_ways_have_the_same_gradients(seed: int) -> None:
    layer = MLAAttention(40, 4, q_lora_rank=None, **SIZES)
    q, q_pe = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 8)
    kv, k_pe = torch.randn(2, 1, 7, 32, requires_grad=True), torch.randn(2, 1, 7, 8)
    gradients = []
    for out in (layer.expanded(q, q_pe, kv, k_pe, None), layer.absorbed(q, q_pe, kv[:, 0], k_pe[:, 0])):
        gradients.append(torch.autograd.grad(out.square().sum(), (kv, layer.kv_b_proj.weight)))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_projection_with_a_bias_is_called(seed: int) -> None:
    stock, cache_class = stock_layer(None, False, True)
    stock.kv_b_proj = torch.nn.Linear(SIZES["kv_lora_rank"], stock.kv_b_proj.out_features).double()
    ours = MLAAttention(40, 4, q_lora_rank=None, **SIZES).double().eval()
    ours.kv_b_proj = torch.nn.Linear(SIZES["kv_lora_rank"], stock.kv_b_proj.out_features).double()
    ours.load_state_dict(stock.state_dict())
    theirs, mine = cache_class(), cache_class()
    for length in (9, 1):
        x, position, past = torch.randn(2, length, 40).double(), rope(length), theirs.get_seq_length()
        position = position[0].double(), position[1].double()
        visible = torch.ones(length, past + length, dtype=torch.bool).tril(past)[None, None]
        with torch.no_grad():
            torch.testing.assert_close(ours(x, position, None, mine)[0], stock(x, position, visible, theirs)[0])


@pytest.mark.parametrize("rank", [None, 24])
def test_an_empty_batch(rank: int | None) -> None:
    x = torch.randn(0, 5, 40, requires_grad=True)
    out = MLAAttention(40, 4, q_lora_rank=rank, **SIZES)(x, rope(5))[0]
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape
