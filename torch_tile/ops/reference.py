# SPDX-License-Identifier: Apache-2.0
"""Ops in plain torch, by name: what Inductor compiles where a kernel cannot be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_tile.kernels import kernels
from torch_tile.ops import layers


def reference(name: str, *args: Any, **kwargs: Any) -> Any:
    """What an op computes, in plain torch."""
    family = {"linear": "gemm", "swiglu": "gemm", "rms_norm": "norm", "add_rms_norm": "norm", "layer_norm": "norm"}
    module = kernels(family.get(name, name.removesuffix("_lse")))
    if name in REFERENCES:
        return REFERENCES[name](module, *args, **kwargs)
    result = module.reference(*args, **kwargs)
    single = isinstance(result, tuple) and not name.endswith(("_lse", "_backward", "fused_norm"))
    return result[0] if single else result


def _linear(module: Any, x: Any, weight: Any, bias: Any = None, residual: Any = None, activation: str = "none") -> Any:
    arguments = layers.linear_as_gemm(x, weight, bias, residual, activation)
    return module.reference(*arguments, layers.linear_dtype(x, residual)).view(*x.shape[:-1], weight.shape[0])


def _swiglu(module: Any, x: Any, gate: Any, up: Any, activation: str = "silu") -> Any:
    weights, text = [gate.mT, up.mT], layers.swiglu_text(activation)
    return module.reference(layers.flattened(x), weights, [], "", text, x.dtype).view(*x.shape[:-1], gate.shape[0])


def _rms_norm(module: Any, x: Any, weight: Any = None, *options: Any, **named: Any) -> Any:
    return module.rms_norm_reference(x, weight, None, *options, **named)[0]


def _add_rms_norm(module: Any, x: Any, residual: Any, weight: Any = None, *options: Any, **named: Any) -> Any:
    return module.rms_norm_reference(x, weight, residual, *options, **named)


REFERENCES: dict[str, Callable[..., Any]] = {
    "linear": _linear, "swiglu": _swiglu, "rms_norm": _rms_norm, "add_rms_norm": _add_rms_norm,
    "layer_norm": lambda module, *args, **kwargs: module.layer_norm_reference(*args, **kwargs),
}  # fmt: skip
"""References of ops whose arguments are not their kernel's."""
