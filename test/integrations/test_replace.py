# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_tile
import torch_tile.nn as tnn
from torch_tile.integrations.replace import Replacement, replace_layers

FAMILIES = ["Llama", "Qwen3", "Mistral", "Gemma", "DeepseekV3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str, build, steps, seed: int) -> None:
    model, ids = build(family), torch.randint(0, 96, (2, 17))
    padding = torch.ones(2, 17, dtype=torch.long)
    padding[0, :3] = 0
    state = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    before = [steps(model, ids), steps(model, ids, padding)[:, 3:]]
    changes = replace_layers(model)
    after = [steps(model, ids), steps(model, ids, padding)[:, 3:]]
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert list(model.state_dict()) == list(state)
    assert all(t.data_ptr() == state[name][0] for name, t in model.state_dict().items())
    counts = {new: sum(change.new == f"torch_tile.nn.{new}" for change in changes) for new in tnn.__all__}
    old = build(family)
    norms = [m for m in old.modules() if "RMSNorm" in type(m).__name__]
    linears = [m for m in old.modules() if type(m) is nn.Linear]
    assert counts["RMSNorm"] == len(norms) and counts["Linear"] == len(linears) and counts["GatedMLP"] == 2
    assert counts["MLAAttention"] == (2 if family == "DeepseekV3" else 0)
    assert changes[-1] == Replacement("", "attn_implementation='sdpa'", "attn_implementation='tile'")
    assert replace_layers(model) == []


SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
SPEECH = {
    "vocab_size": 96, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "num_mel_bins": 8,
    "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
# Family: sizes, class, and what is left as it is because its parameters lie in another way than ours.
ARCHITECTURES = {
    "GPT2": ({"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}, "CausalLM", {"Conv1D"}),
    "Bert": (SIZES, "MaskedLM", set()),
    "Phi3": (GROUPED, "CausalLM", set()),
    "Gemma3Text": ({**GROUPED, "sliding_window": 4}, "CausalLM", set()),
    "Mixtral": ({**GROUPED, "num_local_experts": 4}, "CausalLM", set()),
    "Qwen3Moe": (
        {**GROUPED, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        "CausalLM",
        set(),
    ),
    "ViT": ({**SIZES, "image_size": 16, "patch_size": 4}, "", set()),
    "Whisper": (SPEECH, "SpeechSeq2Seq", set()),
    "T5": (
        {"vocab_size": 96, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4},
        "Seq2SeqLM",
        {"T5LayerNorm"},
    ),
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_other_architectures(family: str, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes, head, left = ARCHITECTURES[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    config._experts_implementation = "batched_mm"
    name = f"AutoModelFor{head}" if head else "AutoModel"
    model = getattr(transformers, name).from_config(config).eval()
    ids = torch.randint(3, 96, (2, 9))
    inputs = {"input_ids": ids}
    if family in ("T5", "Whisper"):
        inputs["decoder_input_ids"] = ids
    if family == "Whisper":
        inputs["input_features"] = torch.randn(2, 8, 32)
        del inputs["input_ids"]
    if family == "ViT":
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key.lower() or ".ln_" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        wanted = model(**inputs)[0]
        state = list(model.state_dict())
        replace_layers(model)
        torch.testing.assert_close(model(**inputs)[0], wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    assert list(model.state_dict()) == state and model.config._attn_implementation == "tile"
    kinds = {type(m).__name__ for m in model.modules() if not type(m).__module__.startswith("torch_tile")}
    assert {kind for kind in kinds if kind == "Linear" or "Norm" in kind or kind == "Conv1D"} == left


def test_bfloat16_is_as_close_to_float64_as_before(build, steps, seed: int) -> None:
    # All experts: rounding may tip a choice among them, in stock as in ours, after which errors say nothing.
    model = build("DeepseekV3", num_experts_per_tok=4, topk_group=2)
    ids = torch.randint(0, 96, (2, 17))
    exact = steps(copy.deepcopy(model).bfloat16().double(), ids)
    model.bfloat16()
    before = (steps(model, ids).double() - exact).norm()
    replace_layers(model)
    assert (steps(model, ids).double() - exact).norm() <= 1.5 * before


def test_says_what_it_did_and_keeps_names(seed: int) -> None:
    model = nn.Sequential(
        nn.Linear(9, 20), nn.GELU("tanh"), nn.Dropout(0.0), nn.LayerNorm(20), nn.Linear(20, 4), nn.Sigmoid()
    )
    names, x = list(model.state_dict()), torch.randn(5, 9)
    wanted = copy.deepcopy(model).double()(x.double())
    changes = torch_tile.replace_layers(model)
    assert [str(change) for change in changes] == [
        "0: Linear -> torch_tile.nn.Linear",
        "3: LayerNorm -> torch_tile.nn.LayerNorm",
        "4: Linear -> torch_tile.nn.Linear",
        "1: GELU -> gelu_tanh in the kernel of the layer before",
    ]
    assert list(model.state_dict()) == names and type(model[5]) is nn.Sigmoid
    torch.testing.assert_close(model(x).double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_model_itself_may_be_a_layer(seed: int) -> None:
    model, x = nn.Linear(5, 3), torch.randn(2, 5)
    wanted = model(x)
    assert str(replace_layers(model)[0]) == "(the model): Linear -> torch_tile.nn.Linear"
    torch.testing.assert_close(model(x), wanted)


def test_filter_and_kinds() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))

    assert [c.name for c in replace_layers(make(), linear=False)] == ["2"]
    assert [c.name for c in replace_layers(make(), norm=False)] == ["0", "1"]
    seen = []
    assert (
        replace_layers(make(), filter_fn=lambda module, name: seen.append((type(module).__name__, name)) or False) == []
    )
    assert seen == [("Linear", "0"), ("LayerNorm", "2")]
    assert [c.name for c in replace_layers(make(), filter_fn=lambda module, name: name != "1")] == ["0", "2"]


def test_ties_hooks_and_sharing_survive(seed: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight
            self.act = nn.ReLU()
            self.twice = nn.ModuleList(
                [nn.Sequential(nn.Linear(6, 6), self.act), nn.Sequential(nn.Linear(6, 6), self.act)]
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.twice:
                x = layer(x)
            return self.head(x)

    model, ids, calls = Tied(), torch.randint(0, 11, (2, 3)), []
    model.head.register_forward_hook(lambda *args: calls.append(1))
    wanted = model(ids)
    changes = replace_layers(model)
    assert {c.name for c in changes} == {"head", "twice.0.0", "twice.0.1", "twice.1.0", "twice.1.1"}
    torch.testing.assert_close(model(ids), wanted)
    assert len(calls) == 2 and model.head.weight is model.embed.weight


class Activations(TorchDispatchMode):
    """Those that linear kernels compute, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.tile.linear.default:
            self.names.append(args[4] if len(args) > 4 else "none")
        return op(*args, **(kwargs or {}))


def fused(model: nn.Module, x: torch.Tensor) -> list[str]:
    with torch.no_grad(), Activations() as found:
        model(x)
    return found.names


def test_children_of_a_sequence_stay_what_they_are(seed: int) -> None:
    """Whoever calls one of them alone, cuts the sequence, or hooks a layer later on gets what torch gives."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.SiLU()), torch.randn(3, 8)
    before = copy.deepcopy(model)
    changes = replace_layers(model)
    assert [c.name for c in changes] == ["0", "2", "1", "3"] and fused(model, x) == ["relu", "silu"]
    for part in (lambda m: m, lambda m: m[0], lambda m: m[:1], lambda m: m[1:], lambda m: m[0:3], lambda m: m[3]):
        torch.testing.assert_close(part(model)(x), part(before)(x))
    ops = [node.target for node in torch.export.export(model, (x,)).graph.nodes if node.op == "call_function"]
    assert ops == [torch.ops.tile.linear.default] * 2
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda layer, args, out: seen.append(out))
    torch.testing.assert_close(model(x), before(x))
    torch.testing.assert_close(seen[0], before[0](x))
    assert fused(model, x) == ["none", "silu"]
    model[1], before[1] = nn.Tanh(), nn.Tanh()
    torch.testing.assert_close(model(x), before(x))


def test_copies_and_pickles(seed: int) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.RMSNorm(6)), torch.randn(2, 6)
    replace_layers(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(x), model(x))
        assert [type(m).__name__ for m in again] == ["Linear", "SiLU", "RMSNorm"] and fused(again, x) == ["silu"]


def test_meta_device(build) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    assert len(replace_layers(model)) == 2
    assert model(torch.empty(3, 6, device="meta")).shape == (3, 6)


def test_only_modules() -> None:
    with pytest.raises(TypeError, match=r"model is of type function; expected an nn\.Module"):
        replace_layers(lambda x: x)
