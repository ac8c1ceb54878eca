# SPDX-License-Identifier: Apache-2.0
import functools
import logging

import pytest
import torch

import torch_tile
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect

pytest.importorskip("transformers")
import transformers
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from torch_tile.integrations import transformers as integration
from torch_tile.integrations.transformers import attention_forward, attention_mask

FAMILIES = ["Llama", "Qwen3", "Mistral", "Gemma", "Gemma2", "GptOss", "DeepseekV3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_prefill_and_decoding(family: str, build, steps, seed: int) -> None:
    model, ids = build(family), torch.randint(0, 96, (2, 17))
    padding = torch.ones(2, 17, dtype=torch.long)
    padding[0, :3] = 0
    before = [steps(model, ids), steps(model, ids, padding)[:, 3:], steps(model, ids, torch.ones_like(padding))]
    model.set_attn_implementation("tile")
    after = [steps(model, ids), steps(model, ids, padding)[:, 3:], steps(model, ids, torch.ones_like(padding))]
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_static_cache(family: str, build, seed: int) -> None:
    model, ids = build(family), torch.randint(0, 96, (2, 9))
    wanted = model(ids, use_cache=False).logits
    model.set_attn_implementation("tile")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        ours = [model(ids[:, part], past_key_values=cache).logits for part in (slice(0, 5), slice(5, 6), slice(6, 9))]
    torch.testing.assert_close(torch.cat(ours, 1), wanted, rtol=1e-4, atol=1e-4)


def test_generate(build, seed: int) -> None:
    model, ids = build("Llama"), torch.randint(0, 96, (2, 5))
    arguments = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5])}
    wanted = model.generate(ids, **arguments)
    model.set_attn_implementation("tile")
    assert torch.equal(model.generate(ids, **arguments), wanted)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "DeepseekV3"])
def test_generate_with_a_static_cache(family: str, build, seed: int) -> None:
    model, ids = build(family), torch.randint(0, 96, (2, 5))
    arguments = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5])}
    wanted = model.generate(ids, **arguments)
    model.set_attn_implementation("tile")
    assert torch.equal(model.generate(ids, cache_implementation="static", **arguments), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "backend"), [("sdpa", "dry"), ("tile", "dry"), ("tile", "tile")])
def test_generate_compiled(implementation: str, backend: str, build, seed: int) -> None:
    """generate() compiles the decoding step itself, as it does on GPUs: one graph for all tokens, all of it found."""
    model, ids = build("Llama"), torch.randint(0, 96, (2, 5))
    arguments = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5])}
    wanted = model.generate(ids, **arguments)
    model.set_attn_implementation(implementation)
    options = {"select": "tile"}
    chosen = "tile" if backend == "tile" else functools.partial(dry_run, options=options)
    how = transformers.CompileConfig(backend=chosen, mode=None, options=options if backend == "tile" else None)
    how._compile_all_devices = True
    torch._dynamo.reset()
    with no_graph_caches(), collect() as report:
        got = model.generate(ids, cache_implementation="static", compile_config=how, **arguments)
    assert torch.equal(got, wanted)
    assert not report.missed() and len(report.replaced("attention")) == 2 and len(report.replaced("norm")) == 5, report
    products = [row for row in report.replaced("gemm") if "rotary_emb" not in row.where]  # older ones multiply there
    assert sum(2 if "2 products" in row.what else 1 for row in products) == 15, report


def test_gradients(build, seed: int) -> None:
    model, ids = build("Llama"), torch.randint(0, 96, (2, 9))
    gradients = []
    for implementation in ("eager", "tile"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("q_length", [1, 3, 6])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("start", ["empty", "cached", "static"])
@pytest.mark.parametrize("padded", [None, False, True])
def test_mask_or_none_says_what_transformers_says(
    q_length: int, window: int | None, start: str, padded: bool | None
) -> None:
    offset = 0 if start == "empty" else 4
    kv_length = offset + q_length + (5 if start == "static" else 0)
    padding = None if padded is None else torch.ones(2, kv_length, dtype=torch.bool)
    if padded:
        padding[1, :2] = False
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    lengths = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": offset}
    mask = attention_mask(**lengths, mask_function=function, attention_mask=padding, local_size=window)
    i, j = torch.arange(q_length)[:, None] + offset, torch.arange(kv_length)
    wanted = (j <= i) & (j > i - (window or 1000))
    wanted = wanted.expand(2, 1, q_length, kv_length) & (padding[:, None, None] if padding is not None else True)
    if mask is None:  # then the end of the queries is the end of the keys, and nothing but causality hides anything
        mask = torch.ones(q_length, kv_length, dtype=torch.bool).tril(kv_length - q_length).expand_as(wanted)
        assert not padded
    assert torch.equal(mask.expand_as(wanted), wanted)


def test_plain_causal_needs_no_mask() -> None:
    assert attention_mask(2, 3, 7, q_offset=4, attention_mask=torch.ones(2, 7, dtype=torch.bool)) is None
    assert attention_mask(2, 3, 7, q_offset=4, local_size=8) is None


@pytest.mark.parametrize("family", ["Bloom", "MPNet"])
@pytest.mark.parametrize("padded", [False, True])
def test_models_that_take_no_attention_function_get_their_own_mask(family: str, padded: bool, seed: int) -> None:
    """transformers refuses "sdpa" for them, but sets any registered name."""
    sizes = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**sizes)
    ids = torch.randint(3, 96, (2, 7))
    padding = torch.ones_like(ids)
    if padded:
        padding[0, 5:] = 0
    with torch.no_grad():
        model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
        wanted = model(ids, attention_mask=padding)[0]
        ours = transformers.AutoModel.from_config(config, attn_implementation="tile").eval()
        ours.load_state_dict(model.state_dict())
        torch.testing.assert_close(ours(ids, attention_mask=padding)[0], wanted)
        fast = torch.compile(ours, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(fast(ids, attention_mask=padding)[0], wanted)


def indexed_model(seed: int) -> torch.nn.Module:
    """A tiny DeepSeek-V3.2, each query of which sees 5 positions."""
    config = transformers.DeepseekV32Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=16,
        index_topk=5, index_n_heads=2, index_head_dim=16, first_k_dense_replace=1, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.DeepseekV32ForCausalLM(config).eval()


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="transformers has no DeepSeek-V3.2")
def test_positions_that_an_indexer_lists(seed: int) -> None:
    """Other implementations than eager and sdpa get the list in place of a mask."""
    model, ids = indexed_model(seed), torch.randint(3, 96, (2, 17))
    padding = torch.ones_like(ids)
    padding[1, :6] = 0
    with torch.no_grad():
        wanted = [model(ids).logits, model(ids, attention_mask=padding).logits[:, 6:]]
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
        model.set_attn_implementation("tile")
        got = [model(ids).logits, model(ids, attention_mask=padding).logits[:, 6:]]
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="transformers has no DeepSeek-V3.2")
@pytest.mark.parametrize("implementation", ["sdpa", "tile"])
def test_explain_of_a_model_with_an_indexer(implementation: str, seed: int) -> None:
    """Attention and the indexer's scores of each layer are ours, and the model computes what it computes by eager."""
    model, ids = indexed_model(seed), torch.randint(3, 96, (2, 17))
    model.set_experts_implementation("batched_mm")
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        report = torch_tile.explain(model, ids, use_cache=False)
        torch._dynamo.reset()
        got = torch.compile(model, backend="tile", options={"select": "tile"})(ids, use_cache=False).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)
    places = [{row.module for row in report.replaced(family)} for family in ("attention", "mla")]
    assert places == [{f"model.layers.{n}.self_attn{part}" for n in (0, 1)} for part in ("", ".indexer")], report


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="transformers has no DeepSeek-V3.2")
def test_models_that_read_masks_get_whole_ones(seed: int) -> None:
    """A packed batch, and a captured graph, where transformers always asks for sequences."""
    model, ids = indexed_model(seed), torch.randint(3, 96, (1, 17))
    model.set_experts_implementation("batched_mm")
    packed = torch.cat([torch.arange(n) for n in (6, 11)])[None]
    with torch.no_grad():
        wanted = [model(ids, position_ids=packed, use_cache=False).logits, model(ids, use_cache=False).logits]
        model.set_attn_implementation("tile")
        captured = torch.compile(model, backend="eager")
        got = [model(ids, position_ids=packed, use_cache=False).logits, captured(ids, use_cache=False).logits]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_listed_positions_hide_the_others(seed: int) -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    listed = torch.tensor([[[0, 4], [-1, 5], [6, 2]], [[1, -1], [3, 6], [9, 0]]])
    seen = torch.stack([(listed == n).any(-1) for n in range(7)], -1) & torch.ones(3, 7, dtype=torch.bool).tril(4)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), seen[:, None], enable_gqa=True
    )
    for mask in (None, torch.ones(1, 1, 3, 7, dtype=torch.bool).tril(4)):
        out, _ = attention_forward(Layer(), q, k, v, mask, indices=listed)
        torch.testing.assert_close(out.transpose(1, 2).double(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="paged cache with lists"):
        attention_forward(Layer(), q, k, v, None, indices=listed, cache=object())


class Layer(torch.nn.Module):
    is_causal = True


def test_position_bias_comes_with_mask_or_causality(seed: int) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = torch.randn(1, 4, 5, 5)
    causal = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), bias.double().masked_fill(~causal, float("-inf")), enable_gqa=True
    )
    for mask in (None, causal, torch.where(causal, 0.0, float("-inf"))):
        out, weights = attention_forward(Layer(), q, k, v, mask, position_bias=bias)
        assert weights is None and out.is_contiguous()
        torch.testing.assert_close(out.transpose(1, 2).double(), wanted, rtol=1e-4, atol=1e-5)


def test_what_is_not_supported_is_said(seed: int, caplog, monkeypatch) -> None:
    monkeypatch.setattr(integration, "_told", set())
    q = torch.randn(1, 2, 3, 8)
    with caplog.at_level(logging.WARNING, "torch_tile"):
        attention_forward(Layer(), q, q, q, None, output_attentions=True)
        attention_forward(Layer(), q, q, q, None, output_attentions=True)
    assert len(caplog.records) == 1 and "does not compute attention weights" in caplog.text
    with pytest.raises(ValueError, match=r"attention_mask is \(1, 3\).*wants four dimensions"):
        attention_forward(Layer(), q, q, q, torch.ones(1, 3, dtype=torch.bool))
