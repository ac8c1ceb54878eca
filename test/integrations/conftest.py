# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers with random weights, and how to run them."""

import pytest
import torch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}
MLA = {
    **SIZES, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
CONFIGS = {
    "Llama": SIZES,
    "Qwen3": SIZES,
    "Mistral": {**SIZES, "sliding_window": 8},
    "Gemma": SIZES,
    "Gemma2": {**SIZES, "sliding_window": 8},
    "GptOss": {**SIZES, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**SIZES, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "DeepseekV3": MLA,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Where a model runs."""
    return request.param


@pytest.fixture
def build():
    """`build(family, **changes)`: a model in evaluation mode whose norms' weights are random too."""
    transformers = pytest.importorskip("transformers")

    def make(family: str, **changes):
        config = getattr(transformers, f"{family}Config")(**CONFIGS[family] | changes)
        config._experts_implementation = "batched_mm"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 0.0 if "Gemma" in family else 1.0, 0.2)
            elif "sinks" in name:
                torch.nn.init.normal_(parameter)
        return model

    return make


@pytest.fixture
def steps():
    """`steps(model, ids, padding)`: logits `[B, S, V]` of a prefill of 12 tokens and steps of 1, 3, 1."""

    def run(model, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        logits, cache = [], None
        with torch.no_grad():
            for part in (slice(0, 12), slice(12, 13), slice(13, 16), slice(16, 17)):
                mask = None if padding is None else padding[:, : part.stop]
                out = model(ids[:, part], attention_mask=mask, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits)
        return torch.cat(logits, dim=1)

    return run
