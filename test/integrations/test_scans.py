# SPDX-License-Identifier: Apache-2.0
"""Scans of transformers' models by ours: logits, gradients and generated tokens are those of the models' own."""

import functools
import subprocess
import sys

import pytest
import torch

import torch_tile
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.integrations import scans

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32}
TWO = {**SIZES, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
STATE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8}
MIXED = ["linear_attention", "full_attention"]
CONVOLUTION = {"causal_conv1d_fn", "causal_conv1d_update"}
MAMBA = CONVOLUTION | {"mamba2_chunk_scan", "mamba2_selective_state_update"}
DELTA = CONVOLUTION | {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"}
KIMI = CONVOLUTION | {"chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"}


def causal_lm(name, config):
    """Make a model of the family `name` with random weights."""
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))


def mamba2():
    sizes = {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}
    return causal_lm("Mamba2", {**TWO, **sizes, "time_step_limit": (0.0, 0.5)})


def bamba():
    return causal_lm("Bamba", {**TWO, **HEADS, **STATE, "intermediate_size": 48, "attn_layer_indices": [1]})


def falcon_h1():
    more = {"head_dim": 16, "intermediate_size": 48, "mamba_d_ssm": 64, "mamba_rms_norm": True, "key_multiplier": 0.5}
    return causal_lm("FalconH1", {**TWO, **HEADS, **STATE, **more})


def granite_hybrid():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16}
    more = {"intermediate_size": 16, "layer_types": MIXED}
    return causal_lm("GraniteMoeHybrid", {**TWO, **HEADS, **STATE, **experts, **more})


def nemotron_h():
    state = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8}
    more = {"head_dim": 16, "intermediate_size": 48, "layers_block_type": [*MIXED, "mlp"]}
    return causal_lm("NemotronH", {**SIZES, **HEADS, **state, **more})


def zamba2():
    state = {"mamba_d_state": 16, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 8}
    more = {"intermediate_size": 48, "layers_block_type": ["linear_attention", "hybrid"], "adapter_rank": 4}
    return causal_lm("Zamba2", {**TWO, **HEADS, **state, **more})


def qwen3_next():
    keys = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    more = {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": MIXED}
    return causal_lm("Qwen3Next", {**TWO, **HEADS, **keys, **experts, **more, "head_dim": 16, "intermediate_size": 48})


def kimi_linear():
    heads = {"num_attention_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    linear = {"linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 16, "layer_types": MIXED}
    more = {"intermediate_size": 48, "mlp_layer_types": ["dense", "dense"], "pad_token_id": 0, "eos_token_id": 2}
    return causal_lm("KimiLinear", {**TWO, **heads, **linear, **more, "bos_token_id": 1})


def minimax():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8}
    more = {"head_dim": 16, "intermediate_size": 48, "layer_types": MIXED}
    return causal_lm("MiniMax", {**TWO, **HEADS, **experts, **more})


MODELS = {
    mamba2: MAMBA, bamba: MAMBA, falcon_h1: MAMBA, granite_hybrid: MAMBA, nemotron_h: MAMBA, zamba2: MAMBA,
    qwen3_next: DELTA, kimi_linear: KIMI, minimax: {"MiniMaxLightningAttention.forward"},
}  # fmt: skip
"""Makers of tiny models, and the functions of each model's file that ours replace."""


def results(model, ids):
    """Logits and gradients of a training step on a padded batch, and what the model generates with its cache."""
    model.train().zero_grad()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    out = model(ids, labels=ids, attention_mask=mask)
    out.loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        tokens = model.eval().generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    return out.logits.detach(), grads, tokens


@pytest.fixture
def restored():
    """Puts the functions of model files back."""
    yield
    for name, file in list(sys.modules.items()):
        if not name.startswith("transformers.models.") or file is None:
            continue
        for _, owner, attribute, function in scans.functions_of(file):
            for mark in ("_tile_old", "_tile_captured"):
                if mark in vars(function):
                    setattr(owner, attribute, vars(function)[mark])


@pytest.mark.parametrize(("make", "roles"), MODELS.items())
def test_a_model_computes_the_same(make, roles, restored, seed):
    torch.manual_seed(seed)
    model, ids = make(), torch.randint(3, 64, (2, 11))
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
    assert len(called) == 2 * TWO["num_hidden_layers"]


def called(graphs):
    """Names of our operators in Dynamo's graphs."""
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    return {name.removeprefix("tile.").removesuffix(".default") for name in nodes if name.startswith("tile.")}


OPERATORS = {
    "mamba2_chunk_scan": ("ssd_chunk_scan", "selective_state_update"),
    "torch_chunk_gated_delta_rule": ("gated_delta_rule", "gated_delta_rule_step"),
    "chunk_kimi_delta_attention": ("gated_delta_rule", "gated_delta_rule_step"),
    "MiniMaxLightningAttention.forward": ("gated_linear_attention", "gated_linear_attention_step"),
}


@pytest.mark.parametrize(("make", "roles"), MODELS.items())
def test_traces_of_the_backend_call_ours(make, roles, restored):
    """On all tokens and on one more with the cache; the files of models may be imported after the backend."""
    from torch._dynamo.testing import CompileCounterWithBackend

    import torch_tile.inductor.backend  # noqa: F401

    scans.capture_scans()  # what another test put back
    model, ids = make().eval(), torch.randint(3, 64, (2, 5))
    whole, step = next(OPERATORS[role] for role in roles if role in OPERATORS)
    convolutions = (("causal_conv1d",), ("causal_conv1d_update",)) if roles & CONVOLUTION else ((), ())
    cache = None
    for names, more in ({whole, *convolutions[0]}, 0), ({step, *convolutions[1]}, 1):
        counter = CompileCounterWithBackend("eager")
        counter.captures_scans = True
        torch._dynamo.reset()
        given = {} if cache is None else {"cache_params" if make is mamba2 else "past_key_values": cache}
        with torch.no_grad():
            try:
                out = torch.compile(model, backend=counter)(ids[:, :1] if more else ids, use_cache=True, **given)
            except torch._dynamo.exc.TorchRuntimeError:
                counter.captures_scans = False
                torch._dynamo.reset()
                with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
                    torch.compile(model, backend=counter)(ids[:, :1] if more else ids, use_cache=True, **given)
                pytest.skip("this torch cannot trace the model's own functions over a cache")
        assert called(counter.graphs) == names
        cache = out["cache_params" if make is mamba2 else "past_key_values"]


LAYERS = {
    mamba2: 2, bamba: 1, falcon_h1: 2, granite_hybrid: 1, nemotron_h: 1, zamba2: 2, qwen3_next: 1, kimi_linear: 1,
    minimax: 1,
}  # fmt: skip
"""How many layers of each tiny model have a scan."""


@pytest.mark.parametrize(("make", "roles"), MODELS.items())
def test_a_training_step_under_the_backend_is_eagers(make, roles, restored, seed):
    torch.manual_seed(seed)
    model, ids = make().train(), torch.randint(3, 64, (2, 11))
    parameters = list(model.parameters())
    experts = any(name.endswith("experts") for name, _ in model.named_modules())
    if experts and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        pytest.skip("the gradient of this transformers' product of groups asks for offsets on the host")

    def step():
        return model(ids, labels=ids, use_cache=False).loss

    want = step()
    expected = torch.autograd.grad(want, parameters, allow_unused=True)
    scans.capture_scans()
    torch._dynamo.reset()
    with collect() as report:
        got = torch.compile(step, backend=functools.partial(dry_run, options={"select": "tile"}))()
        found = torch.autograd.grad(got, parameters, allow_unused=True)
    whole = next(OPERATORS[role][0] for role in roles if role in OPERATORS)
    rows = [row.what.split("(")[0] for row in report.replaced("scan") if row.graph != "backward"]
    assert rows.count(f"tile.{whole}") == LAYERS[make], report
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for (name, _), ours, eager in zip(model.named_parameters(), found, expected, strict=True):
        assert (ours is None) == (eager is None), name
        if ours is not None:
            torch.testing.assert_close(ours, eager, rtol=2e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_the_backend_takes_scans_of_models(restored, seed):
    """Without a change to the model; eager runs, other backends and other families have the model's own."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(seed)
    model, ids, other = mamba2().eval(), torch.randint(0, 64, (2, 5)), CompileCounterWithBackend("eager")
    want = model(ids).logits.detach()
    scans.capture_scans()
    torch.testing.assert_close(model(ids).logits, want)
    for given, train in ({}, False), ({"labels": ids}, True):
        rows = torch_tile.explain(model.train(train), ids, **given, backward=train).rows
        found = [row.what.split("(")[0] for row in rows if row.family == "scan"]
        assert sorted(found) == 2 * ["tile.causal_conv1d"] + 2 * ["tile.ssd_chunk_scan"]
    model.eval()
    without = torch_tile.explain(model, ids, options={"select": "tile", "families": ("gemm",)})
    assert not [row for row in without.rows if row.family == "scan"]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=other)(ids).logits, want, rtol=1e-3, atol=1e-4)
    assert not called(other.graphs)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=dry_run)(ids).logits, want, rtol=1e-3, atol=1e-4)


def test_files_that_are_imported_later_are_captured():
    """A new process, where the backend is imported before any model."""
    script = """
import torch, transformers, torch_tile.inductor.backend
from transformers.models.bamba import modeling_bamba
assert hasattr(modeling_bamba.mamba2_chunk_scan, "_tile_captured")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
