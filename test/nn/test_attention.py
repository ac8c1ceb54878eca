# SPDX-License-Identifier: Apache-2.0
"""Decoding with DeepSeek-V3's layers over pages: stock layers with a cache of their own say what is right."""

import copy
import functools

import pytest
import torch

import torch_tile
from torch_tile.inductor.compat import graph_breaks, no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.nn import Attention, MLAAttention, PagedLatents

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


SIZES_paged = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 96,
}  # fmt: skip
PAGE = 4


@pytest.fixture
def models(seed):
    """A stock DeepSeek-V3, and a copy whose attention layers are ours, with the same state dict."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(**SIZES_paged)
    config._experts_implementation = "batched_mm"
    stock = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for name, parameter in stock.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    ours = copy.deepcopy(stock)
    torch_tile.replace_layers(ours)
    assert sum(isinstance(m, MLAAttention) for m in ours.modules()) == 2
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def step(model, ids, cache):
    """Logits `[B, S, V]` of new tokens at the positions behind the cached ones."""
    x = model.model.embed_tokens(ids)
    positions = cache.seq_lens[:, None] + torch.arange(ids.shape[1])
    rope = model.model.rotary_emb(x, positions)
    for layer in model.model.layers:
        x = layer(x, position_embeddings=rope, position_ids=positions, past_key_values=cache)
        x = x[0] if isinstance(x, tuple) else x
    return model.lm_head(model.model.norm(x))


def new_cache(lengths, **kwargs):
    """Pages in no order, none more than needed; what is never needed is -1, what was never written is not a number."""
    blocks = [-(-n // PAGE) for n in lengths]
    order = iter(torch.randperm(sum(blocks)).tolist())
    table = torch.tensor([[next(order) if i < n else -1 for i in range(max(blocks))] for n in blocks])
    cache = PagedLatents(2, sum(blocks), PAGE, 32, 8, table, **kwargs)
    cache.kv.fill_(torch.nan)
    cache.k_pe.fill_(torch.nan)
    return cache


def decode(model, prompts, run, count):
    """Greedy decoding: each prompt by itself, then all sequences together; tokens and logits."""
    cache = new_cache([len(p) + count for p in prompts])
    logits = []
    for row, prompt in enumerate(prompts):
        part = cache.sequences(slice(row, row + 1))
        logits.append(step(model, prompt[None], part)[:, -1])
        part.advance(len(prompt))
    cache.is_empty = False
    found = [torch.cat(logits)]
    for _ in range(count):
        found.append(run(model, found[-1].argmax(-1)[:, None], cache)[:, -1])
        cache.advance(1)
    return torch.stack(found, 1)


def decode_stock(model, prompt, count):
    cache, ids, found = None, prompt[None], []
    for _ in range(count + 1):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1)[:, None]
        found.append(out.logits[:, -1])
    return torch.stack(found, 1)


def prompts_of(*lengths):
    return [torch.randint(0, SIZES_paged["vocab_size"], (n,)) for n in lengths]


@torch.no_grad()
def test_ragged_sequences_decode_as_alone(models):
    stock, ours = models
    prompts = prompts_of(5, 37, 1)
    wanted = torch.cat([decode_stock(stock, p, 6) for p in prompts])
    torch.testing.assert_close(decode(ours, prompts, step, 6), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_long_prompts_are_expanded_and_short_ones_absorbed(models, monkeypatch):
    ways = []
    for name in ("absorbed", "expanded"):
        plain = getattr(MLAAttention, name)
        monkeypatch.setattr(MLAAttention, name, lambda *a, n=name, f=plain: ways.append(n) or f(*a))
    decode(models[1], prompts_of(37, 1), step, 1)
    assert ways == ["expanded", "expanded", *["absorbed"] * 4]


@torch.no_grad()
def test_latents_of_pages_are_expanded_by_a_projection_with_hooks(models):
    stock, ours = models
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(lambda layer, args, out: out + out.tanh() / 4)
    prompts = prompts_of(5, 37, 1)
    wanted = torch.cat([decode_stock(stock, p, 6) for p in prompts])
    torch.testing.assert_close(decode(ours, prompts, step, 6), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_planned_step(models, monkeypatch):
    """All layers of a step use its plan, and the next step makes a new one."""
    _, ours = models
    prompts, planned = prompts_of(130, 2, 64), []

    def planned_step(model, ids, cache):
        cache.plan(ids.shape[1], SIZES_paged["num_attention_heads"])
        logits = step(model, ids, cache)
        planned.append(cache.schedule)
        return logits

    wanted = decode(ours, prompts, step, 2)
    torch.testing.assert_close(decode(ours, prompts, planned_step, 2), wanted, rtol=1e-4, atol=1e-4)
    assert planned[0].shape == planned[1].shape and planned[0] is not planned[1]
    cache = new_cache([3])
    cache.plan(1, 4)
    assert cache.sequences(slice(0, 1)).schedule is None
    cache.advance(1)
    assert cache.schedule is None


@torch.no_grad()
def test_several_tokens_behind_cached_ones(models):
    """As a speculated continuation is verified: causal among themselves."""
    _, ours = models
    prompts, more = prompts_of(6, 6), torch.randint(0, 96, (2, 3))
    whole, parts = new_cache([9, 9]), new_cache([9, 9])
    wanted = step(ours, torch.cat([torch.stack(prompts), more], 1), whole)[:, 6:]
    step(ours, torch.stack(prompts), parts)
    parts.advance(6)
    torch.testing.assert_close(step(ours, more, parts), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding_loop(models):
    _, ours = models
    prompts, breaks = prompts_of(5, 9), graph_breaks()
    compiled = torch.compile(step, backend=functools.partial(dry_run, options={"select": "tile"}))
    with no_graph_caches(), collect() as report:
        got = decode(ours, prompts, compiled, 4)
    torch.testing.assert_close(got, decode(ours, prompts, step, 4), rtol=1e-4, atol=1e-4)
    assert graph_breaks() == breaks and not report.missed(), report
    assert report.replaced("gemm") and report.replaced("norm")


def test_a_mask_is_refused():
    layer = MLAAttention(40, 4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    x, rope = torch.randn(1, 1, 40), (torch.ones(1, 1, 8), torch.zeros(1, 1, 8))
    with pytest.raises(ValueError, match="attention_mask must be None with PagedLatents"):
        layer(x, rope, torch.ones(1, 1, 1, 1), new_cache([1]))
