# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.nn import Attention

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def stock_layer(kind: str):
    transformers = pytest.importorskip("transformers")
    if kind == "Llama":
        from transformers.models.llama.modeling_llama import LlamaAttention as Layer

        config = transformers.LlamaConfig(**SIZES, attention_bias=True)
    else:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention as Layer

        config = transformers.Qwen3Config(**SIZES)
    config._attn_implementation = "sdpa"
    return Layer(config, 0).eval(), transformers.DynamicCache


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_agrees_with_transformers_in_prefill_and_decoding(kind: str, seed: int) -> None:
    stock, cache_class = stock_layer(kind)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    llama = kind == "Llama"
    ours = Attention(48, 4, 2, 16, bias=llama, qk_norm=not llama).eval()
    ours.load_state_dict(stock.state_dict())
    theirs, mine = cache_class(), cache_class()
    stock.double()
    for length, name in ((7, "cache"), (1, "past_key_values")):
        x, angle = torch.randn(2, length, 48), torch.rand(1, length, 8).repeat(1, 1, 2) * 6
        rope = (angle.cos(), angle.sin())
        with torch.no_grad():
            out, weights = ours(x, rope, None, **{name: mine})
            wanted, _ = stock(x.double(), tuple(t.double() for t in rope), None, theirs)
        assert weights is None
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_mask_says_everything(seed: int) -> None:
    layer, x = Attention(24, 3), torch.randn(2, 5, 24)
    with torch.no_grad():
        causal = layer(x)[0]
        everything = layer(x, attention_mask=torch.ones(1, 1, 5, 9, dtype=torch.bool))[0]  # longer than the keys
        same = layer(x, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())[0]
        layer.causal = False
        torch.testing.assert_close(layer(x)[0], everything)
    torch.testing.assert_close(same, causal)
    assert not torch.allclose(causal, everything)


def test_window(seed: int) -> None:
    layer, x = Attention(24, 3, window=2), torch.randn(1, 6, 24)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], layer(x, attention_mask=((j <= i) & (j > i - 2))[None, None])[0])


@pytest.mark.parametrize(
    ("arguments", "message"), [((24, 4, 3), "num_heads is 4; it must be a multiple"), ((25, 4), "hidden_size is 25")]
)
def test_sizes_are_checked(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(*arguments)


@pytest.mark.parametrize("size", [(0, 5), (2, 0), (0, 0)])
def test_an_empty_batch(size: tuple[int, int]) -> None:
    x = torch.randn(*size, 24, requires_grad=True)
    out = Attention(24, 3, 1, qk_norm=True)(x, (torch.randn(1, size[1], 8), torch.randn(1, size[1], 8)))[0]
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape
