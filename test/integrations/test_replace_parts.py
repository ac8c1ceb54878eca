# SPDX-License-Identifier: Apache-2.0
"""Parts of a replaced model are called, whatever they get later: a change of each kind for each part."""

import copy
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torch_tile.integrations.replace import replace_layers

Undo = Callable[[], object]
LINEARS_AND_ACTIVATIONS = "linear", "activation"


class Adapter(nn.Module):
    """A layer around another one, as adapters put it in a model; it is no linear map."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args, **named):
        return other(self.base(*args, **named))


def other(out):
    """Another result: of a tuple, the first tensor changes."""
    if isinstance(out, torch.Tensor):
        return out + out.detach().tanh() / 4 if out.is_floating_point() else out
    return (other(out[0]), *out[1:]) if isinstance(out, tuple) else out


def kind_of(part: nn.Module) -> str:
    """Whether a part is a linear layer, an activation, or something else."""
    if isinstance(part, nn.Linear):
        return "linear"
    named = type(part).__name__
    return "activation" if "GELU" in named or "SiLU" in named or named == "ReLU" else "other"


def hook(model: nn.Module, name: str) -> Undo:
    return model.get_submodule(name).register_forward_hook(lambda part, args, out: other(out)).remove


def hook_before(model: nn.Module, name: str) -> Undo:
    return model.get_submodule(name).register_forward_pre_hook(lambda part, args: (other(args[0]), *args[1:])).remove


def patch(model: nn.Module, name: str) -> Undo:
    part = model.get_submodule(name)
    old = part.forward
    part.forward = lambda *args, **named: other(old(*args, **named))
    return lambda: delattr(part, "forward")


def put(model: nn.Module, name: str, new: nn.Module) -> Undo:
    old = model.get_submodule(name)
    model.set_submodule(name, new)
    return lambda: model.set_submodule(name, old)


def adapt(model: nn.Module, name: str) -> Undo:
    return put(model, name, Adapter(model.get_submodule(name)))


def give_tanh(model: nn.Module, name: str) -> Undo:
    return put(model, name, nn.Tanh())


def give_option(model: nn.Module, name: str) -> Undo:
    """Change what an activation of the same class computes with."""
    part = model.get_submodule(name)
    option, value = ("approximate", "tanh") if isinstance(part, nn.GELU) else ("act", torch.tanh)
    old = getattr(part, option, None)
    if old is None:
        return lambda: None
    setattr(part, option, value)
    return lambda: setattr(part, option, old)


CHANGES = {
    hook: ("linear", "activation", "other"), hook_before: LINEARS_AND_ACTIVATIONS, patch: LINEARS_AND_ACTIVATIONS,
    adapt: LINEARS_AND_ACTIVATIONS, give_tanh: ("activation",), give_option: ("activation",),
}  # fmt: skip


def follow(model: nn.Module, change: Callable[[nn.Module, str], Undo], run: Callable[[nn.Module], torch.Tensor]) -> int:
    """Compare a model with its replaced copy after a change of each part; return how many parts changed the result."""
    ours = copy.deepcopy(model)
    assert replace_layers(ours, experts=True)
    plain, counted = run(model), 0
    torch.testing.assert_close(run(ours), plain, rtol=2e-4, atol=2e-4 * plain.abs().max().item())
    for name, part in list(model.named_modules()):
        if not name or kind_of(part) not in CHANGES[change]:
            continue
        undo = change(model, name), change(ours, name)
        wanted = run(model)
        error = (run(ours) - wanted).abs().max().item()
        assert error <= 2e-4 * wanted.abs().max().item(), (name, error)
        counted += not torch.allclose(wanted, plain)
        for each in undo:
            each()
    torch.testing.assert_close(run(ours), plain, rtol=2e-4, atol=2e-4 * plain.abs().max().item())
    return counted


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_parts_of_a_sequence(change: Callable[[nn.Module, str], Undo], seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 7, bias=False), nn.SiLU(), nn.RMSNorm(7),
        nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.LayerNorm(8)), nn.Linear(8, 5), nn.GELU("none"),
    )  # fmt: skip
    x = torch.randn(11, 7)
    assert follow(model, change, lambda each: each(x).detach())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", ["Llama", "Gemma", "Qwen3Moe", "DeepseekV3"])
def test_parts_of_models(family: str, change: Callable[[nn.Module, str], Undo], build, steps, seed: int) -> None:
    """A prefill and decoding; the layers of DeepSeek absorb weights in the latter."""
    torch.manual_seed(seed)
    model, ids = build(family, num_hidden_layers=2), torch.randint(0, 96, (2, 17))
    found = follow(model, change, lambda each: steps(each, ids))
    assert found >= (0 if change is give_option else 2)


class Slope(nn.Module):
    """SiLU of a multiple that its owner may change in place."""

    def __init__(self, held: object, key: object) -> None:
        super().__init__()
        self.held, self.key = held, key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = getattr(self.held, self.key) if isinstance(self.key, str) else self.held[self.key]
        return nn.functional.silu(x * slope)

    def change(self) -> None:
        if isinstance(self.key, str):
            setattr(self.held, self.key, 2.0)
        else:
            self.held[self.key] = 2.0


@pytest.mark.parametrize(
    "held", [([1.0], 0), ({1: 1.0}, 1), (torch.ones(1), 0), (types.SimpleNamespace(slope=1.0), "slope")], ids=repr
)
def test_activations_whose_options_change_in_place(held: tuple[object, object], seed: int) -> None:
    torch.manual_seed(seed)
    gated = nn.Module()
    gated.gate_proj, gated.up_proj, gated.down_proj = nn.Linear(7, 9), nn.Linear(7, 9), nn.Linear(9, 7)
    gated.act_fn, x = Slope(*copy.deepcopy(held)), torch.randn(11, 7)
    gated.__class__ = type("Gated", (nn.Module,), {"forward": _gated})
    model = nn.Sequential(nn.Linear(7, 7), Slope(*copy.deepcopy(held)), gated)
    ours = copy.deepcopy(model)
    assert replace_layers(ours)
    for each in (model, ours):
        each[1].change()
        each[2].act_fn.change()
    torch.testing.assert_close(ours(x), model(x), rtol=2e-4, atol=1e-4)


def _gated(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
