# SPDX-License-Identifier: Apache-2.0
"""Tiny mixtures of experts with `experts_implementation="tile"`: eager's numbers, in inference and a training step."""

import pytest
import torch

import torch_tile

transformers = pytest.importorskip("transformers")

SIZE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZE, num_local_experts=5),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZE, head_dim=16, num_experts=6, moe_intermediate_size=24),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZE, **MLA, n_routed_experts=8, n_group=4, topk_group=2, moe_intermediate_size=24, first_k_dense_replace=0
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_inference_and_a_training_step(name, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    ids = torch.randint(1, 64, (2, 9))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def results():
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        loss = model(input_ids=ids, labels=ids).loss
        return logits, loss, torch.autograd.grad(loss, parameters, allow_unused=True)

    want = results()
    done = torch_tile.replace_layers(model, linear=False, norm=False, mlp=False, attention=False, experts=True)
    assert [str(r.new) for r in done] == ["experts_implementation='tile'"]
    calls = []
    handle = _Counting(calls)
    with handle:
        got = results()
    assert calls.count("tile::group_tokens") == 2 and calls.count("tile::grouped_gemm") >= 4, calls
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
    for ours, eager in zip(got[2], want[2], strict=True):
        assert (ours is None) == (eager is None)
        if ours is not None:
            torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-5)


class _Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.name())
        return func(*args, **(kwargs or {}))
