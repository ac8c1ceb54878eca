# SPDX-License-Identifier: Apache-2.0
"""Scans of transformers' models by ours: logits, gradients and generated tokens are those of the models' own."""

import sys

import pytest
import torch

import torch_tile
from torch_tile.integrations import scans

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def mamba2():
    config = transformers.Mamba2Config(
        **SIZES, num_heads=4, head_dim=16, state_size=16, n_groups=2, chunk_size=8, time_step_limit=(0.0, 0.5)
    )
    return transformers.Mamba2ForCausalLM(config)


def bamba():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 16}
    state = {"mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8}
    config = transformers.BambaConfig(**SIZES, **heads, **state, intermediate_size=48, attn_layer_indices=[1])
    return transformers.BambaForCausalLM(config)


def qwen3_next():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    keys = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    config = transformers.Qwen3NextConfig(
        **SIZES, **heads, **keys, **experts, linear_value_head_dim=8, intermediate_size=48,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


MAMBA = {role for role in scans.ROLES if "mamba2" in role or "conv" in role}
DELTA = {role for role in scans.ROLES if "delta" in role or "conv" in role}


def results(model, ids):
    """Logits and gradients of a training step, and what the model generates."""
    model.train().zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        tokens = model.eval().generate(ids, max_new_tokens=4, do_sample=False)
    return out.logits.detach(), grads, tokens


@pytest.fixture
def restored():
    """Puts the functions of model files back."""
    yield
    for name, file in list(sys.modules.items()):
        for role in scans.ROLES if name.startswith("transformers.models.") else ():
            for mark in ("_tile_old", "_tile_captured"):
                function = getattr(file, role, None)
                if mark in vars(function or object):
                    setattr(file, role, vars(function)[mark])


@pytest.mark.parametrize(("make", "roles"), [(mamba2, MAMBA), (bamba, MAMBA), (qwen3_next, DELTA)])
def test_a_model_computes_the_same(make, roles, restored, seed):
    torch.manual_seed(seed)
    model, ids = make(), torch.randint(0, 64, (2, 11))
    want = results(model, ids)
    others = {"linear": False, "norm": False, "mlp": False, "attention": False}
    assert not torch_tile.replace_layers(model, **others)  # scans only if asked for
    done = torch_tile.replace_layers(model, **others, scan=True)
    assert {change.old for change in done} == roles
    assert not torch_tile.replace_layers(model, **others, scan=True)  # once
    got = results(model, ids)
    torch.testing.assert_close(got[:2], want[:2], rtol=1e-3, atol=1e-4)
    assert torch.equal(got[2], want[2])


def test_functions_that_compute_something_else_stay(restored):
    file = sys.modules[type(mamba2().backbone.layers[0].mixer).__module__]
    old = file.mamba2_chunk_scan

    def doubled(*args, **named):
        out, states = old.__wrapped__(*args, **named)
        return 2 * out, states

    try:
        file.mamba2_chunk_scan = doubled
        names = [name for _, name in scans.replace_scans(mamba2())]
        assert "mamba2_chunk_scan" not in names and "causal_conv1d_fn" in names
        assert file.mamba2_chunk_scan is doubled
    finally:
        file.mamba2_chunk_scan = old


def test_packed_sequences_and_other_activations_go_to_the_old_function():
    x, weight = torch.randn(1, 5, 6), torch.randn(5, 4)
    old = lambda *args, **named: ("old", named)  # noqa: E731
    call = scans.replacement(old, scans.convolution)
    assert call(x, weight, None, activation="gelu") == ("old", {"activation": "gelu"})
    assert call(x, weight, None, seq_idx=x)[1]["seq_idx"] is x


@pytest.mark.parametrize(
    "name",
    [*("falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid")],
)
def test_files_of_other_hybrids_agree(name):
    file = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    found = {
        role: scans.agrees(getattr(file, role), *pair) for role, pair in scans.ROLES.items() if hasattr(file, role)
    }
    assert all(found.values()) and len(found) == 4, found


def test_a_compiled_model_calls_the_operators_in_one_graph(restored):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, ids, counter = mamba2(), torch.randint(0, 64, (2, 5)), CompileCounterWithBackend("eager")
    want = model(ids).logits
    scans.replace_scans(model)
    torch.testing.assert_close(torch.compile(model, backend=counter)(ids).logits, want, rtol=1e-3, atol=1e-4)
    assert counter.frame_count == 1
    called = [str(node.target) for node in counter.graphs[0].graph.nodes if "tile" in str(node.target)]
    assert len(called) == 2 * SIZES["num_hidden_layers"]


@pytest.mark.parametrize("make", [mamba2, qwen3_next])
def test_the_backend_takes_scans_of_models(make, restored, seed):
    """Without a change to the model; eager runs, other backends and other families have the model's own."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(seed)
    model, ids, other = make().eval(), torch.randint(0, 64, (2, 5)), CompileCounterWithBackend("eager")
    want = model(ids).logits.detach()
    scans.capture_scans()
    torch.testing.assert_close(model(ids).logits, want)
    found = {row.what.split("(")[0] for row in torch_tile.explain(model, ids).rows if row.family == "scan"}
    scan = "tile.ssd_chunk_scan" if make is mamba2 else "tile.gated_delta_rule"
    assert found == {"tile.causal_conv1d", scan}
    without = torch_tile.explain(model, ids, options={"select": "tile", "families": ("gemm",)})
    assert not [row for row in without.rows if row.family == "scan"]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=other)(ids).logits, want, rtol=1e-3, atol=1e-4)
    assert not [n for g in other.graphs for n in g.graph.nodes if "tile" in str(n.target)]
    from torch_tile.inductor.dry_run import dry_run

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=dry_run)(ids).logits, want, rtol=1e-3, atol=1e-4)
