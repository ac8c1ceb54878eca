# SPDX-License-Identifier: Apache-2.0
"""Keywords of attention layers: transformers' own are taken, no other one is ignored."""

import ast
import inspect
import logging
from pathlib import Path

import pytest
import torch

from torch_tile.nn import Attention, MLAAttention
from torch_tile.nn.decoder_keywords import MASKS, SEQUENCES, DecoderKeywords

KINDS = ["attention", "mla"]
X, ROPE = torch.randn(1, 3, 24), (torch.ones(1, 3, 4), torch.zeros(1, 3, 4))
MASK = torch.ones(3, 3, dtype=torch.bool).tril()
DECODERS = ("llama", "qwen3", "qwen3_moe", "mistral", "mixtral", "deepseek_v2", "deepseek_v3", "gemma2", "olmo2")


class Cache:
    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int) -> None:
        pytest.fail("written")


def layer_of(kind: str) -> Attention | MLAAttention:
    widths = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return Attention(24, 6) if kind == "attention" else MLAAttention(24, 2, q_lora_rank=None, **widths)


@pytest.mark.parametrize("kind", KINDS)
def test_what_decoder_layers_pass_has_no_effect(kind: str, seed: int) -> None:
    layer = layer_of(kind)
    given = {
        "position_ids": torch.arange(3)[None] + 5, "cache_position": torch.arange(3), "use_cache": True,
        "num_items_in_batch": torch.tensor(7), "output_hidden_states": True, "output_router_logits": True,
        "output_attentions": False, "is_causal": True, "max_length_q": 3, "max_length_k": 3,
    }  # fmt: skip
    assert {*given, *SEQUENCES} == set(DecoderKeywords.__annotations__)
    with torch.no_grad():
        wanted = layer(X, ROPE)[0]
        assert torch.equal(layer(X, ROPE, **given)[0], wanted)
        assert torch.equal(layer(X, ROPE, **dict.fromkeys(DecoderKeywords.__annotations__))[0], wanted)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(X, ROPE, **given)[0], wanted)
        masked = layer(X, ROPE, MASK)[0]
        beside = {name: torch.tensor([0, 3]) for name in SEQUENCES} | {"is_causal": False}
        assert torch.equal(layer(X, ROPE, MASK, **beside)[0], masked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "given, wanted",
    [
        *[({name: torch.ones(1, 1, 3, 3)}, f"{name}=, .* attention_mask=") for name in MASKS],
        ({"attentin_mask": None}, "attentin_mask=, .*did you mean attention_mask="),
        ({"past_key_value": None}, "past_key_value=, .*did you mean past_key_values="),
        ({"kv_states": Cache()}, "kv_states=, .*looks like a cache.*cache="),
        ({"position_id": 1}, "did you mean position_ids="),
        ({"sliding_window": 4}, "sliding_window=, .*its window when it is made"),
        ({"scaling": 0.5}, "scaling=, .*its scale when it is made"),
        ({"dropout": 0.1}, "dropout=, .*no layer here has one"),
        ({"settings": {"a": 1}}, r"takes no settings=, which would have no effect(\n|$)"),
    ],
)
def test_other_keywords_are_refused(kind: str, given: dict, wanted: str) -> None:
    with pytest.raises(TypeError, match=wanted):
        layer_of(kind)(X, ROPE, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "given",
    [{"output_attentions": True}, {"is_causal": False}, *[{name: torch.tensor([0, 1, 3])} for name in SEQUENCES]],
)
def test_values_that_would_change_the_result_are_refused(kind: str, given: dict) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=name):
        layer_of(kind)(X, ROPE, **given)


def test_a_layer_that_is_not_causal_refuses_is_causal() -> None:
    layer = Attention(24, 6, causal=False)
    with torch.no_grad():
        layer(X, ROPE, is_causal=False)
    with pytest.raises(ValueError, match="is_causal is True, but this Attention is not causal"):
        layer(X, ROPE, is_causal=True)


def test_the_keywords_are_those_of_transformers() -> None:
    """A new version of transformers that passes more makes this fail."""
    transformers = pytest.importorskip("transformers")
    from transformers.utils.generic import TransformersKwargs

    taken = {*DecoderKeywords.__annotations__, *inspect.signature(Attention.forward).parameters}
    assert set(TransformersKwargs.__annotations__) <= taken
    folder = Path(transformers.__file__).parent / "models"
    found = set()
    for name in DECODERS:
        tree = ast.parse((folder / name / f"modeling_{name}.py").read_text())
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        found |= {k.arg for call in calls if call.func.attr == "self_attn" for k in call.keywords if k.arg}
    assert "position_ids" in found and found <= taken


def test_attention_of_transformers_tells_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    from torch_tile.integrations import transformers as ours

    q = torch.randn(1, 2, 4, 8)
    layer = torch.nn.Module()
    ours._told.clear()
    with caplog.at_level(logging.WARNING, "torch_tile"):
        ours.attention_forward(layer, q, q, q, None, position_ids=torch.arange(4), deterministic=False, alibi=None)
        assert not caplog.records
        for _ in range(2):
            ours.attention_forward(layer, q, q, q, None, alibi=torch.ones(2))
    assert [r.message for r in caplog.records] == [
        'attn_implementation="tile" computes attention without alibi=, which it does not know'
    ]
    with pytest.raises(ValueError, match="sinks of each query"):
        ours.attention_forward(layer, q, q, q, None, sinks=torch.zeros(1, 2, 4, 1))
