# SPDX-License-Identifier: Apache-2.0
"""transformers' models through `torch.compile(backend="tile")`: eager's numbers, everything replaced, no graph break.

Tiny random configurations, the whole of Inductor. Prefill, then a decode step with the cache; then a training step.
"""

import copy
import functools

import pytest
import torch

from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import graph_breaks, no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect

transformers = pytest.importorskip("transformers")

SIZE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
MOE = {"num_experts_per_tok": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SIZE, sliding_window=6),
    "gemma": lambda: transformers.GemmaConfig(**SIZE, head_dim=16),
    # Both kinds of layers: a sliding window and none; caps that bend the scores of random weights.
    "gemma2": lambda: transformers.Gemma2Config(
        **{**SIZE, "num_hidden_layers": 2}, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SIZE, "num_key_value_heads": 4, "num_hidden_layers": 2}, **MLA, first_k_dense_replace=1
    ),
}
# Without code generation only.
OTHERS = {
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZE, head_dim=16, sliding_window=6),
    "phi3": lambda: transformers.Phi3Config(**SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "mixtral": lambda: transformers.MixtralConfig(**SIZE, **MOE, num_local_experts=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZE, **MOE, head_dim=16, num_experts=2, moe_intermediate_size=32
    ),
}
# In training only: gradients of normalised keys lie in memory as our kernel writes them, and are viewed as torch's lie.
TRAINED = {"apertus": lambda: transformers.ApertusConfig(**SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2)}


@pytest.fixture(autouse=True)
def fresh():
    """A graph from a cache runs no pass and reports nothing."""
    with no_graph_caches():
        yield


def build(name, dtype=torch.float32, implementation="sdpa"):
    config = (CONFIGS | OTHERS | TRAINED)[name]()
    if dtype == torch.bfloat16 and name == "deepseek_v3":
        # Rounding may tip the choice of an expert, in eager as in ours, after which errors say nothing: use all.
        config.num_experts_per_tok, config.topk_group = config.n_routed_experts, config.n_group
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for p in model.parameters():  # norm weights start at one or zero, which would hide an offset or a lost weight
            p.add_(torch.randn_like(p) * 0.1)
    return model.to(dtype)


def compiled(model, backend=tile):
    return torch.compile(model, backend=functools.partial(backend, options={"select": "tile"}))


def linears(report, graph):
    """Count the products of linear layers. Older versions of transformers multiply positions in `rotary_emb`, too."""
    rows = [r for r in report.replaced("gemm") if r.graph == graph and "rotary_emb" not in r.where]
    return sum(2 if "2 products" in r.what else 1 for r in rows)


def check_report(report, model, graph="inference"):
    kinds = [type(m).__name__ for m in model.modules()]
    routers = sum(k.lower().endswith("topkrouter") for k in kinds)
    merged = sum(isinstance(getattr(m, "gate_up_proj", None), torch.nn.Linear) for m in model.modules())
    assert linears(report, graph) == kinds.count("Linear") + merged + routers, report
    norms = [r for r in report.replaced("norm") if r.what.startswith("tile.rms_norm")]  # some then take a residual sum
    assert len(norms) == sum(k.endswith("RMSNorm") for k in kinds), report
    assert len(report.replaced("attention")) == model.config.num_hidden_layers, report
    assert not [r for r in report.missed() if r.graph != "backward"], report


def error(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


# All of Inductor where it may matter; the rest without code generation, which takes a tenth of the time.
WHOLE = {("llama", torch.float32), ("deepseek_v3", torch.bfloat16)}
PREFILL = [
    *((name, dtype) for name in CONFIGS for dtype in (torch.float32, torch.bfloat16)),
    *((name, torch.float32) for name in OTHERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), PREFILL)
def test_prefill_and_decode(name, dtype):
    model = build(name, dtype, "eager" if name == "gemma2" else "sdpa").eval()
    truth = copy.deepcopy(model).double()
    truth.config._experts_implementation = "batched_mm"  # grouped_mm takes no float64
    ids = torch.randint(0, SIZE["vocab_size"], (2, 11))
    caches = [transformers.DynamicCache(config=model.config) for _ in range(3)]
    fast, breaks = compiled(model, tile if (name, dtype) in WHOLE else dry_run), graph_breaks()
    with torch.no_grad():
        for step in (slice(0, 9), slice(9, 10)):
            with collect() as report:
                got = fast(input_ids=ids[:, step], past_key_values=caches[0], use_cache=True).logits
            eager, exact = (
                m(input_ids=ids[:, step], past_key_values=c, use_cache=True).logits
                for m, c in ((model, caches[1]), (truth, caches[2]))
            )
            check_report(report, model)
            if dtype == torch.float32:
                assert error(got, eager.double()) < 1e-4
            else:
                assert error(got, exact) <= 1.5 * error(eager, exact)
    assert graph_breaks() == breaks


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_written_out_over_a_static_cache(name):
    """transformers' own attention in bfloat16, over a cache of fixed size: masked by position, written by index."""
    model = build(name, torch.bfloat16, "eager").eval()
    ids = torch.randint(0, SIZE["vocab_size"], (2, 10))
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    fast = compiled(model, dry_run)
    with torch.no_grad():
        for step in (slice(0, 9), slice(9, 10)):
            with collect() as report:
                got = fast(input_ids=ids[:, step], past_key_values=caches[0], use_cache=True).logits
            check_report(report, model)
            want = model(input_ids=ids[:, step], past_key_values=caches[1], use_cache=True).logits
            assert error(got, want.double()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(  # gemma2 writes attention out, and keeps the probabilities for its backward
    ("name", "backend"), [("llama", tile), *((name, dry_run) for name in [*CONFIGS, *TRAINED] if name != "gemma2")]
)
def test_training_step(name, backend):
    model = build(name)
    if name == "deepseek_v3" and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        pytest.skip("this transformers reads sizes of groups in its backward, which no graph can hold")
    ids = torch.randint(0, SIZE["vocab_size"], (2, 9))
    with collect() as report:
        loss = compiled(model, backend)(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    want = model(input_ids=ids, labels=ids, use_cache=False).loss
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert got.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert (got[n] - p.grad).norm() <= 1e-4 * p.grad.norm() + 1e-7, n
    found = [r for r in report.replaced("attention") if r.graph == "forward"]
    assert len(found) == model.config.num_hidden_layers
    assert len([r for r in report.replaced("norm") if r.graph == "forward"]) == sum(
        type(m).__name__.endswith("RMSNorm") for m in model.modules()
    )


@pytest.mark.slow
def test_eager_attention_is_found_too():
    """Attention written out by transformers, grouped heads, additive mask, float softmax and all."""
    model = build("llama", torch.bfloat16, "eager").eval()
    ids = torch.randint(0, SIZE["vocab_size"], (2, 9))
    truth = copy.deepcopy(model).double()
    with torch.no_grad():
        with collect() as report:
            got = compiled(model)(input_ids=ids, use_cache=False).logits
        eager, exact = (m(input_ids=ids, use_cache=False).logits for m in (model, truth))
    check_report(report, model)
    assert "causal" in report.replaced("attention")[0].what
    assert error(got, exact) <= 1.5 * error(eager, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_layer_norm_models(name):
    common = {"vocab_size": 96}
    if name == "gpt2":
        config = transformers.GPT2Config(**common, n_embd=48, n_layer=1, n_head=4, n_positions=64)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        count = 5
    else:
        config = transformers.BertConfig(
            **common, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=80
        )
        model = transformers.AutoModelForMaskedLM.from_config(config).eval()
        count = 8
    ids = torch.randint(0, 96, (2, 9))
    with torch.no_grad():
        with collect() as report:
            got = compiled(model)(input_ids=ids)[0]
        want = model(input_ids=ids)[0]
    assert error(got, want.double()) < 1e-4
    norms = sum(isinstance(m, torch.nn.LayerNorm) for m in model.modules())
    found = len(report.replaced("attention")), len(report.replaced("norm")), len(report.replaced("gemm"))
    assert found == (1, norms, count), report
    assert not report.missed(), report


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_encoders(implementation):
    """A vision transformer, and a speech encoder with its decoder that attends to it."""
    vision = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=80, image_size=16, patch_size=8
    )
    speech = transformers.WhisperConfig(
        vocab_size=96, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, num_mel_bins=16,
        decoder_attention_heads=4, encoder_ffn_dim=80, decoder_ffn_dim=80, max_source_positions=20, pad_token_id=0,
        max_target_positions=32, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    vision._attn_implementation = speech._attn_implementation = implementation
    vit, whisper = transformers.ViTModel(vision).eval(), transformers.WhisperModel(speech).eval()
    ids = torch.randint(0, 96, (2, 6))
    cases = [
        (vit, {"pixel_values": torch.randn(2, 3, 16, 16)}, 1),
        (whisper, {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": ids, "use_cache": False}, 3),
    ]
    for model, inputs, attentions in cases:
        with torch.no_grad(), collect() as report:
            got = compiled(model, dry_run)(**inputs)[0]
        with torch.no_grad():
            assert error(got, model(**inputs)[0].double()) < 1e-4
        count = {t: sum(isinstance(m, t) for m in model.modules()) for t in (torch.nn.Linear, torch.nn.LayerNorm)}
        assert len(report.replaced("attention")) == attentions, report
        assert (linears(report, "inference"), len(report.replaced("norm"))) == tuple(count.values()), report
        assert not report.missed(), report
