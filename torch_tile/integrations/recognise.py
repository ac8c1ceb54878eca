# SPDX-License-Identifier: Apache-2.0
"""Recognise layers that one of our layers can replace.

Layers of torch are known by their exact type. Layers of other libraries are tried out: a stand-in with small random
parameters runs beside our layer. Only equal results count, whatever the class is called.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import torch_tile.nn as tnn
from torch_tile.kernels.norm.norm import rms_norm_reference
from torch_tile.nn.linear import FUNCTIONS, HOOKS, is_product, is_watched, options_of

log: logging.Logger = logging.getLogger("torch_tile")
Tensor = torch.Tensor

MLA_SIZES = {
    "hidden_size": 12,
    "num_heads": 2,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Plan:
    """The class that shall replace a module's class, its new attributes, and the parameters of `like`, if given."""

    new: type[nn.Module]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    like: nn.Module | None = None

    def apply(self, module: nn.Module) -> None:
        """Change the module's class and attributes in place; parameters, hooks and references stay as they are."""
        module.__class__ = self.new
        if self.like is not None:
            module.__dict__.pop("forward", None)
            for held in ("_parameters", "_buffers", "_modules"):
                module.__dict__[held] = self.like.__dict__[held]
                for name in module.__dict__[held]:
                    module.__dict__.pop(name, None)  # an attribute would hide it
        for name, value in self.attributes.items():
            setattr(module, name, value)


def plan_for(module: nn.Module, kinds: Mapping[str, bool]) -> Plan | None:
    """Return the plan for a layer. None if the layer is unknown, or if our layer would compute something else."""
    if "forward" in module.__dict__ or not all(type(p) is nn.Parameter for p in module.parameters(recurse=False)):
        return None  # patched by someone, quantised or distributed
    for kind, make in PLANNERS.items():
        if not kinds.get(kind, False):
            continue
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # the same decision every time
                plan = make(module)
        except Exception as problem:  # a trial of unknown code may fail in any way: then it is not what we know
            log.info("%s is not replaced: its trial as %s failed: %s", type(module).__name__, kind, problem)
            continue
        if plan is not None:
            return plan
    return None


def plan_linear(module: nn.Module) -> Plan | None:
    """Plan an nn.Linear, but no class derived from it."""
    return Plan(tnn.Linear, {"activation": "none"}) if type(module) is nn.Linear else None


def plan_norm(module: nn.Module) -> Plan | None:
    """Plan nn.LayerNorm, nn.RMSNorm, and written-out RMS norms with one weight."""
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        if len(module.normalized_shape) != 1:  # type: ignore[arg-type]
            return None
        if type(module) is nn.LayerNorm:
            return Plan(tnn.LayerNorm)
        return Plan(tnn.RMSNorm, {"activation": "none", "weight_offset": 0.0, "cast_first": False})
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    if "rmsnorm" not in type(module).__name__.lower() or isinstance(module, tnn.RMSNorm) or weight is None or not alone:
        return None
    names = [name for name in ("variance_epsilon", "eps", "epsilon") if isinstance(getattr(module, name, None), float)]
    if weight.dim() != 1 or not names:
        return None
    parameters = norm_parameters(module)
    if parameters is None:
        log.info("%s is not replaced: its forward takes more than an input and a gate", type(module).__name__)
        return None
    eps = float(getattr(module, names[0]))
    best = min(rms_norm_forms(module, weight.shape[0], eps, parameters), key=lambda form: form[0])
    if best[0] > 0.01:  # of the elements; the wrong order of rounding differs in about a quarter of them
        log.info("%s is not replaced: it is no RMS norm that we know", type(module).__name__)
        return None
    return Plan(tnn.RMSNorm, {"eps": eps, "activation": "none", **best[1]})


def norm_parameters(module: nn.Module) -> list[inspect.Parameter] | None:
    """Return the parameters of forward: an input and perhaps a gate; None if there are others."""
    found = list(inspect.signature(module.forward).parameters.values())
    usual = all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in found)
    return found if usual and len(found) in (1, 2) else None


def rms_norm_forms(
    module: nn.Module, size: int, eps: float, parameters: Sequence[inspect.Parameter]
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Try every form of RMS norm; return the share of elements that differ from the module's, and our attributes."""
    gated = len(parameters) == 2
    samples = []
    for dtype, weight_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32,) * 2,
    ):
        shape = (4, 8, size)  # three dimensions, which some norms with a gate insist on
        x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(size).to(weight_dtype)
        x[:1] *= 1e-3  # so that eps matters
        trial = stand_in(module, {"weight": nn.Parameter(weight)}, {})
        arguments: list[tuple[torch.Tensor, ...]] = [(x, torch.randn(shape).to(dtype))] if gated else [(x,)]
        if gated and parameters[1].default is not inspect.Parameter.empty:
            arguments.append((x,))  # without its gate it is a plain norm
        samples += [(weight, given, trial(*given)) for given in arguments]
    names = tuple(each.name for each in parameters)
    gates = itertools.product(("before", "after"), (False, True)) if gated else (("none", False),)
    for offset, cast_first, (gating, rounded) in itertools.product((0.0, 1.0), (True, False), list(gates)):
        form: dict[str, Any] = {"weight_offset": offset, "cast_first": cast_first, "names": names}
        form |= {"gating": gating, "gate_rounded": rounded}
        yield max(share_of_differences(norm_of_form(w, eps, form, *x), y) for w, x, y in samples), form


class ReferenceNorm(tnn.RMSNorm):
    """Our RMS norm in plain torch, for a trial that need not compile a kernel."""

    def _normalised(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Compute the RMS norm by its reference."""
        eps = 0.0 if self.eps is None else self.eps
        return rms_norm_reference(x, weight, None, eps, "none", self.weight_offset, self.cast_first)[0]


def norm_of_form(weight: Tensor, eps: float, form: Mapping[str, Any], *arguments: Tensor) -> Tensor:
    """Make our norm with the attributes of a form."""
    ours = ReferenceNorm(weight.shape[0], eps, dtype=weight.dtype)
    ours.weight = nn.Parameter(weight)
    Plan(ReferenceNorm, form).apply(ours)
    out: Tensor = ours(*arguments)
    return out


def share_of_differences(a: Tensor, b: Tensor) -> float:
    """Return the share of elements that differ: in low precision at all, in float32 by more than rounding explains."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return 1.0
    tolerance = 1e-5 if a.dtype == torch.float32 else 0.0
    return 1.0 - torch.isclose(a, b, rtol=tolerance, atol=tolerance).double().mean().item()


def plan_mlp(module: nn.Module) -> Plan | None:
    """Plan gated feed-forward layers with gate_proj, up_proj, down_proj and an activation, and nothing else."""
    if not {"gate_proj", "up_proj", "down_proj"} <= module._modules.keys() or isinstance(module, tnn.GatedMLP):
        return None
    linears = {name: module._modules[name] for name in ("gate_proj", "up_proj", "down_proj")}
    others = {name: child for name, child in module._modules.items() if name not in linears}
    if module._parameters or module._buffers or not all(is_plain_linear(linear) for linear in linears.values()):
        return None
    if len(others) > 1:
        return None
    attribute = next(iter(others), "act_fn")
    function = getattr(module, attribute, None)
    name = activation_of(function)
    if name is None:
        return None
    hidden, inner = 8, 12
    small = {n: nn.Linear(inner, hidden) if n == "down_proj" else nn.Linear(hidden, inner) for n in linears}
    for n, linear in small.items():
        if linears[n].bias is None:  # type: ignore[union-attr]
            linear.bias = None  # type: ignore[assignment]
    trial = stand_in(module, {}, {**module._modules, **small})
    for value in ("hidden_size", "intermediate_size"):
        trial.__dict__.pop(value, None)
    x = torch.randn(64, hidden) * 20  # large, so that limits on the activations show
    gate, up = small["gate_proj"](x), small["up_proj"](x)
    ours = small["down_proj"](FUNCTIONS[name](gate) * up)
    for training in (False, True):  # dropout shows in training
        trial.training = training
        if not torch.allclose(trial(x), ours, rtol=1e-4, atol=1e-4):
            log.info("%s is not replaced: it is no plain gated MLP", type(module).__name__)
            return None
    return Plan(tnn.GatedMLP, {"activation": name, "recognised": (attribute, function, options_of(function))})


def plan_mla(module: nn.Module) -> Plan | None:
    """Plan multi-head latent attention with DeepSeek-V3's parameters, as transformers has it."""
    wanted = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    if not wanted <= module._modules.keys() or isinstance(module, tnn.MLAAttention):
        return None
    config, kv_b = getattr(module, "config", None), module._modules["kv_b_proj"]
    if config is None or not is_plain_linear(kv_b) or module.__dict__.get("attention_dropout"):
        return None
    absent = [name for name in (*MLA_SIZES, "q_lora_rank", "scaling", "layer_idx") if not hasattr(module, name)]
    if absent:
        log.info("%s is not replaced: it has no %s", type(module).__name__, ", ".join(absent))
        return None
    interleave = bool(config.__dict__.get("rope_interleave", False))
    bias = getattr(module._modules["o_proj"], "bias", None) is not None
    latent = None if module.q_lora_rank is None else 14
    ours = tnn.MLAAttention(
        **MLA_SIZES, q_lora_rank=latent, bias=bias, rope_interleave=interleave, scale=float(module.scaling)  # type: ignore[arg-type]
    )  # fmt: skip
    trial = mla_stand_in(module, ours, config)
    hidden, angles = torch.randn(2, 5, MLA_SIZES["hidden_size"]), torch.rand(1, 5, 2) * 6
    angles = torch.cat([angles, angles], dim=-1)
    rope = (angles.cos(), angles.sin())
    visible = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    theirs = trial(hidden, position_embeddings=rope, attention_mask=torch.where(visible, 0.0, -1e30))[0]
    if not torch.allclose(theirs, ours(hidden, rope, visible)[0], rtol=1e-4, atol=1e-4):
        log.info("%s is not replaced: it is no latent attention that we know", type(module).__name__)
        return None
    attributes: dict[str, Any] = {"rope_interleave": interleave}
    return Plan(tnn.MLAAttention, attributes)


def mla_stand_in(module: nn.Module, ours: tnn.MLAAttention, config: Any) -> nn.Module:
    """Copy the module with small random children, for a trial in eager torch."""
    children: dict[str, nn.Module | None] = dict.fromkeys(module._modules)
    for name, child in ours.named_children():
        old = module._modules[name]
        if isinstance(child, tnn.RMSNorm):  # theirs, so that its form and eps are tried out as well
            weight = nn.Parameter(torch.rand(child.normalized_shape) + 0.5)
            children[name] = stand_in(old, {"weight": weight}, {})
            plan = plan_norm(old) if old is not None and not isinstance(old, tnn.RMSNorm) else Plan(tnn.RMSNorm)
            ours._modules[name] = copy.copy(children[name])
            if plan is not None and ours._modules[name] is not None:
                plan.apply(ours._modules[name])  # type: ignore[arg-type]
        else:
            children[name] = child
    trial = stand_in(module, {}, children)
    eager = copy.copy(config)
    eager._attn_implementation = "eager"
    for name, size in {**MLA_SIZES, "qk_head_dim": 10, "num_key_value_groups": 1}.items():
        object.__setattr__(trial, name, size)
    object.__setattr__(trial, "q_lora_rank", ours.q_lora_rank)
    object.__setattr__(trial, "config", eager)
    return trial


def stand_in(module: nn.Module | None, parameters: Mapping[str, Any], children: Mapping[str, Any]) -> nn.Module:
    """Copy a module in evaluation mode, with other parameters and children, and without hooks."""
    made = copy.copy(module)
    if made is None:
        raise ValueError("a layer is missing")
    made.__dict__.update({name: {} for name in HOOKS if name in made.__dict__})
    made.__dict__["_parameters"], made.__dict__["_modules"] = dict(parameters), dict(children)
    made.__dict__["training"] = False
    return made


def is_plain_linear(module: nn.Module | None) -> bool:
    """Return whether a linear layer is just its weight and bias, so that it need not be called."""
    return module is not None and is_product(module) and all(type(p) is nn.Parameter for p in module.parameters())


def activation_of(function: Any) -> str | None:
    """Return our ops' name of an activation function, or of a module without state, parts or options; else None."""
    if isinstance(function, nn.Module):
        if is_watched(function) or any((function._parameters, function._buffers, function._modules)):
            return None
        if not all(
            isinstance(each, int | float | str | None) or callable(each) for each in options_of(function).values()
        ):
            return None
        function = copy.copy(function).train()
    x = torch.cat([torch.linspace(-12, 12, 241, dtype=torch.float64), torch.tensor([-1e3, 1e3], dtype=torch.float64)])
    try:
        with torch.random.fork_rng(devices=[]):
            y = function(x)
    except (TypeError, ValueError, RuntimeError):
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    close = (name for name, ours in FUNCTIONS.items() if torch.allclose(y, ours(x), rtol=1e-6, atol=1e-6))
    return next(close, None)


PLANNERS: dict[str, Callable[[nn.Module], Plan | None]] = {
    "linear": plan_linear,
    "norm": plan_norm,
    "mlp": plan_mlp,
    "attention": plan_mla,
}
