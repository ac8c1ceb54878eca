# SPDX-License-Identifier: Apache-2.0
"""`torch_tile.replace_layers(model)`: a model's own layers become ours, in place, and nothing else changes."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

import torch_tile.nn as tnn
from torch_tile.diagnostics.arguments import calls_back, can_take, names_parameters
from torch_tile.integrations.quantized import plan_quantized
from torch_tile.integrations.recognise import activation_of, is_plain_linear, plan_for
from torch_tile.integrations.scans import replace_scans
from torch_tile.nn.linear import FUSED, is_product, is_unchanged, is_watched, options_of

log: logging.Logger = logging.getLogger("torch_tile")


@dataclass(frozen=True)
class Replacement:
    """One replaced layer: its name in the model, its old class and its new class."""

    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name or '(the model)'}: {self.old} -> {self.new}"


class Replacements(list[Replacement]):
    """What `replace_layers` changed. It is no model: a use as one says that the model itself was changed."""

    def __call__(self, *args: object, **named: object) -> NoReturn:
        """Raise the TypeError for a call as of a model."""
        raise TypeError(f"called as a model: {_NO_MODEL}")

    def __getattr__(self, name: str) -> Any:
        if hasattr(nn.Module, name):
            raise AttributeError(f"`{name}` of a model: {_NO_MODEL}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_NO_MODEL = (
    "replace_layers changes the model in place and returns the list of what it replaced; write "
    "`replace_layers(model)` by itself, and call `model`"
)


@names_parameters
def replace_layers(
    model: nn.Module,
    *,
    linear: bool = True,
    norm: bool = True,
    mlp: bool = True,
    attention: bool = True,
    quantized: bool = True,
    scan: bool = False,
    experts: bool = False,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> Replacements:
    """Turn the layers of a model that `torch_tile.nn` has into ours, in place.

    Parameters, their names, hooks, ties and the state dict stay as they are. Only layers that compute the same up to
    rounding are touched. Torch's own are known by their exact type. Gated MLPs, RMS norms and latent attention of other
    libraries must agree in a trial on small random parameters. Quantised linear layers are known by their class and
    its attributes; their numbers are kept, but lie in other buffers. Other layers (patched or derived ones) are left
    alone. Reasons are logged by the logger "torch_tile" at level INFO.

    Args:
        model: changed in place; on any device, "meta" included.
        linear: `nn.Linear`, together with the activation that follows it in an `nn.Sequential`.
        norm: `nn.LayerNorm`, `nn.RMSNorm` over the last dimension, and transformers' RMS norms.
        mlp: gated MLPs: `down_proj(act(gate_proj(x)) * up_proj(x))`.
        attention: DeepSeek's latent attention, and `attn_implementation="tile"` for a model of transformers.
        quantized: frozen linear layers of bitsandbytes (4 and 8 bits), GPTQ, AWQ, torchao (int8 and float8),
            compressed-tensors, and transformers' fine-grained float8; and transformers' experts in float8 and MXFP4.
        scan: scans and short convolutions of transformers' models (Mamba-2 and its hybrids), in the file of
            the model: all models of the file use ours from then on. Filters are not asked.
        experts: `experts_implementation="tile"` for a model of transformers: its mixtures of experts sort tokens by
            `tile.group_tokens` and multiply by `tile.grouped_gemm`.
        filter_fn: called with each layer that could be replaced and its name; False leaves it alone.

    Returns:
        What was changed, in the model's order; empty if nothing was.
    """
    kinds = {"linear": linear, "norm": norm, "mlp": mlp, "attention": attention}
    if filter_fn is not None and not can_take(filter_fn, 2):
        raise TypeError(
            f"replace_layers: filter_fn is {filter_fn!r}; expected a function of a layer and its name, "
            "as lambda layer, name: isinstance(layer, nn.Linear)"
        )

    def wanted(module: nn.Module, name: str) -> bool:
        with calls_back("replace_layers calls filter_fn(layer, name)"):
            chosen = True if filter_fn is None else filter_fn(module, name)
        if chosen is None:  # else a forgotten `return` would leave all layers alone
            raise TypeError(f"replace_layers: filter_fn returns None for the layer {name!r}; expected True or False")
        return bool(chosen)

    done = Replacements()
    for name, module in list(model.named_modules()):
        old = type(module).__name__
        plan = (plan_quantized(module) if quantized else None) or plan_for(module, kinds)
        if plan is not None and wanted(module, name):
            plan.apply(module)
            done.append(Replacement(name, old, f"torch_tile.nn.{plan.new.__name__}"))
    if linear:
        done += fuse_activations(model, wanted)
    if attention:
        done += switch_attention(model, wanted)
    if experts:
        done += switch_experts(model, wanted)
    if scan:
        done += [Replacement(file, name, "torch_tile.nn.scans") for file, name in replace_scans(model)]
    return done


def fuse_activations(model: nn.Module, wanted: Callable[[nn.Module, str], bool]) -> Iterator[Replacement]:
    """Let every nn.Sequential compute a linear layer of ours together with the activation that follows it."""
    for prefix, parent in list(model.named_modules()):
        if type(parent) is not nn.Sequential or "forward" in parent.__dict__:
            continue
        for (_, first), (key, second) in itertools.pairwise(list(parent.named_children())):
            if type(first) is not tnn.Linear or not is_plain_linear(first) or is_watched(second):
                continue
            activation = activation_of(second)
            name = f"{prefix}.{key}" if prefix else key
            if activation in (None, "none") or not wanted(second, name):
                continue
            second.__dict__[FUSED] = activation, options_of(second)
            parent.__class__ = Sequential
            yield Replacement(name, type(second).__name__, f"{activation} in the kernel of the layer before")


def switch_attention(model: nn.Module, wanted: Callable[[nn.Module, str], bool]) -> Iterator[Replacement]:
    """Set attn_implementation="tile" on the outermost models of transformers."""
    if "transformers" not in sys.modules:  # then none of its models can be here
        return
    from transformers import PreTrainedModel

    switched: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or any(name == s or name.startswith(s) for s in switched):
            continue
        switched.append(f"{name}." if name else "")
        before: Any = module.config._attn_implementation
        if before == "tile" or not wanted(module, name):
            continue
        from torch_tile.integrations.transformers import register_with_transformers

        register_with_transformers()
        try:
            module.set_attn_implementation("tile")
        except ValueError as problem:
            log.info("%s keeps its attention: %s", type(module).__name__, problem)
        if module.config._attn_implementation == "tile":
            yield Replacement(name, f"attn_implementation={before!r}", "attn_implementation='tile'")


def switch_experts(model: nn.Module, wanted: Callable[[nn.Module, str], bool]) -> Iterator[Replacement]:
    """Set experts_implementation="tile" on the models of transformers that have mixtures of experts."""
    if "transformers" not in sys.modules:  # then none of its models can be here
        return
    from transformers import PreTrainedModel

    from torch_tile.integrations.experts import is_experts, register_experts

    if not register_experts():
        return
    for name, module in model.named_modules():
        before = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if not isinstance(module, PreTrainedModel) or before in (None, "tile") or not wanted(module, name):
            continue
        if not any(map(is_experts, module.modules())):
            continue
        module.set_experts_implementation("tile")
        yield Replacement(name, f"experts_implementation={before!r}", "experts_implementation='tile'")


# An nn.Sequential that computes linear layers together with the activations behind them.


class Sequential(nn.Sequential):
    """nn.Sequential that runs our linear layers with the named activation behind as one kernel, children kept."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute as nn.Sequential does, from `[..., K]`."""
        children: list[nn.Module | None] = [*self, None]
        at = 0
        while (layer := children[at]) is not None:
            activation = together(layer, children[at + 1])
            if activation is None:
                input, at = layer(input), at + 1
            else:
                input = torch.ops.tile.linear.default(input, layer.weight, layer.bias, None, activation)
                at += 2
        return input


def together(layer: nn.Module, after: nn.Module | None) -> str | None:
    """Return the activation that fuses with the layer before it, if neither has hooks or changed."""
    known: tuple[str, dict[str, Any]] | None = after.__dict__.get(FUSED) if after is not None else None
    if known is None or type(layer) is not tnn.Linear or not is_product(layer):
        return None
    return known[0] if is_unchanged(after, known[1]) else None
