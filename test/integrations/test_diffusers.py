# SPDX-License-Identifier: Apache-2.0
"""The backend "tile" of diffusers' attention, in a stand-in of its dispatcher and, where it is installed, in diffusers.

The stand-in has what the registration touches: an Enum of names, a registry, and a call by name.
"""

import importlib
import importlib.util
import inspect
import sys
from enum import Enum
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import torch_tile

MODULE = "torch_tile.integrations.diffusers"


class Registry:
    def __init__(self) -> None:
        self.functions, self.takes = {}, {}

    def register(self, backend, constraints=None, supports_context_parallel=False):
        def keep(function):
            self.functions[backend] = function
            self.takes[backend] = set(inspect.signature(function).parameters)
            return function

        return keep


@pytest.fixture
def dispatch(monkeypatch):
    """Call a backend by its name, as diffusers does: arguments that it does not take are left out."""
    names = Enum("AttentionBackendName", {"NATIVE": "native"}, type=str)
    registry = Registry()
    module = ModuleType("diffusers.models.attention_dispatch")
    module.AttentionBackendName, module._AttentionBackendRegistry = names, registry
    models = ModuleType("diffusers.models")
    models.attention_dispatch = module
    for name, each in (
        ("diffusers", ModuleType("diffusers")), ("diffusers.models", models), (module.__name__, module)
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    importlib.import_module(MODULE).register_with_diffusers()  # a second time
    assert [each.value for each in names] == ["native", "tile"] and names("tile") is names.TILE
    assert list(registry.functions) == [names.TILE]

    def call(**named):
        kept = {name: value for name, value in named.items() if name in registry.takes[names("tile")]}
        return registry.functions[names("tile")](**kept)

    yield call
    sys.modules.pop(MODULE, None)


def inputs(heads=4, kv_heads=4, queries=19, keys=19):
    shapes = [(2, queries, heads, 32), (2, keys, kv_heads, 32), (2, keys, kv_heads, 32)]
    return [torch.randn(shape) for shape in shapes]


def reference(q, k, v, mask=None, causal=False, scale=None):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(dispatch, causal):
    q, k, v = inputs()
    out = dispatch(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=causal, scale=0.2, unknown=1)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), reference(q, k, v, None, causal, 0.2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["keys", "bool", "added"])
def test_cross_attention_with_a_mask(dispatch, kind):
    q, k, v = inputs(kv_heads=2, keys=13)
    seen = torch.rand(2, 13) > 0.3
    seen[:, 0] = True
    mask = {"keys": seen, "bool": seen[:, None, None], "added": torch.randn(2, 1, 19, 13)}[kind]
    wanted = reference(q, k, v, mask[:, None, None] if kind == "keys" else mask)
    out = dispatch(query=q, key=k, value=v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)


def test_gradients(dispatch):
    given = [x.requires_grad_() for x in inputs()]
    exact = [x.detach().double().requires_grad_() for x in given]
    dispatch(query=given[0], key=given[1], value=given[2]).square().sum().backward()
    reference(*exact).square().sum().backward()
    for ours, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-3)


def test_what_it_cannot_do_is_said(dispatch):
    q, k, v = inputs(kv_heads=2)
    for named, word in (({}, "enable_gqa"), ({"return_lse": True}, "return_lse"), ({"_parallel_config": 1}, "context")):
        with pytest.raises(ValueError, match=word):
            dispatch(query=q, key=k, value=v, **named)
    q, k, v = inputs()
    assert dispatch(query=q, key=k, value=v, dropout_p=0.5).shape == q.shape


def flux(diffusers):
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 21, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(21, 3),
    }  # fmt: skip


def wan(diffusers):
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 12, 16), "encoder_hidden_states": torch.randn(1, 11, 16),
        "timestep": torch.tensor([5]),
    }  # fmt: skip


def cogvideox(diffusers):
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=8,
        num_layers=2, sample_width=8, sample_height=8, sample_frames=8, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=8,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 2, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 8, 8),
        "timestep": torch.tensor([3]),
    }  # fmt: skip


def sd3(diffusers):
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([3.0]),
    }  # fmt: skip


class CountAttention(TorchDispatchMode):
    """Count calls of tile.attention."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.tile.attention.default
        return function(*args, **(kwargs or {}))


needs_diffusers = pytest.mark.skipif(
    importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed"
)  # fmt: skip


@needs_diffusers
@pytest.mark.parametrize("make, attentions", [(flux, 2), (wan, 4)])
def test_a_model_of_diffusers(make, attentions):
    """A tiny diffusion transformer gives the same by both backends, and ours computes each of its attentions."""
    import diffusers

    sys.modules.pop(MODULE, None)
    importlib.import_module(MODULE)
    model, inputs = make(diffusers)
    model.eval()
    with torch.no_grad():
        model.set_attention_backend("native")  # what is set stays for models made later
        with CountAttention() as native:
            wanted = model(**inputs).sample
        model.set_attention_backend("tile")
        with CountAttention() as tile:
            got = model(**inputs).sample
    model.reset_attention_backend()
    assert (native.calls, tile.calls) == (0, attentions)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@needs_diffusers
@pytest.mark.parametrize("make", [cogvideox, sd3])
def test_models_that_call_torch_themselves_are_compiled(make):
    """Backends of diffusers do not reach these models, and torch.compile does."""
    import diffusers

    model, inputs = make(diffusers)
    model.eval()
    with torch.no_grad():
        report = torch_tile.explain(model, **inputs)
    assert report.replaced("attention")
