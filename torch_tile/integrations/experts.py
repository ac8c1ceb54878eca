# SPDX-License-Identifier: Apache-2.0
"""`experts_implementation="tile"` for mixtures of experts of transformers: no host waits, one product for each matrix.

Pairs of token and expert are sorted on the device; the gate and its activation are the epilogue of the first product.
"""

from __future__ import annotations

from typing import Any

import torch

import torch_tile.ops  # noqa: F401 - registers torch.ops.tile
from torch_tile.nn.linear import is_watched

Tensor = torch.Tensor
ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "ReLU": "relu",
}  # fmt: skip
"""Epilogue functions of transformers' activation modules, by the name of the class: a graph can read that."""


def register_experts() -> bool:
    """Make `experts_implementation="tile"` known to transformers; False if its version has no such choice."""
    try:
        from transformers.integrations import moe
    except ImportError:
        return False
    moe.ExpertsInterface.register("tile", experts_forward)
    return True


def is_experts(module: Any) -> bool:
    """Return whether a module is a mixture of experts that looks its forward up by `experts_implementation`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute experts as transformers' models call them.

    Args:
        self: the module, whose matrices, biases and gate are used.
        hidden_states: `[T, K]`.
        top_k_index: `[T, k]`, the experts of each token; experts of other ranks are from `self.num_experts` on.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, K]`, in hidden_states' dtype.
    """
    k = top_k_index.shape[-1]
    order, place, offsets = torch.ops.tile.group_tokens(top_k_index, self.num_experts)
    rows = _up(self, hidden_states[order // k], offsets)
    rows = _product(rows, [_matrices(self, "down_proj")], offsets, _bias(self, "down_proj"))
    if getattr(self, "has_post_expert_norm", False):  # older versions have no such layers
        rows = self.post_expert_norm(rows)
    # Rows behind the last group are zeros of the product, and have weights of zero.
    mixed = (rows[place] * top_k_weights[..., None]).sum(1)
    return mixed.to(hidden_states.dtype)


def _matrices(self: Any, name: str) -> Tensor:
    """Return the matrices of a layer as `[experts, K, N]`."""
    found: Tensor = getattr(self, name)
    return found if self.is_transposed else found.mT


def _bias(self: Any, name: str) -> Tensor | None:
    """Return the bias of a projection, `[experts, N]`, if the layer has biases."""
    return getattr(self, f"{name}_bias") if self.has_bias else None


def _product(x: Tensor, bs: list[Tensor], offsets: Tensor, bias: Tensor | None = None, epilogue: str = "") -> Tensor:
    """Multiply runs of rows by their experts' matrices; add the bias, or apply the epilogue."""
    aux, kinds = ([], "") if bias is None else ([bias], "g")
    text = epilogue if bias is None else "v0=add(acc0,x0);ret v0"
    dtype = bs[0].dtype
    found: Tensor = torch.ops.tile.grouped_gemm(x.to(dtype), bs, offsets, aux, kinds, text, dtype)
    return found


def _up(self: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """Return the first product with gate and activation, in one kernel where the gate is the usual one."""
    if not self.has_gate:
        return self.act_fn(_product(x, [_matrices(self, "up_proj")], offsets, _bias(self, "up_proj")))  # type: ignore[no-any-return]
    both = _matrices(self, "gate_up_proj")
    activation = ACTIVATIONS.get(type(self.act_fn).__name__) if _usual_gate(self) else None
    if activation is None or self.has_bias:
        gated: Tensor = self._apply_gate(_product(x, [both], offsets, _bias(self, "gate_up_proj")))
        return gated
    text = f"v0={activation}(acc0);v1=mul(v0,acc1);ret v1"
    return _product(x, list(both.chunk(2, -1)), offsets, None, text)


def _usual_gate(self: Any) -> bool:
    """Return whether a module multiplies the activation of the first half of the columns by the second half."""
    from transformers.integrations import moe

    own = "_apply_gate" in self.__dict__ or is_watched(self.act_fn)
    return type(self)._apply_gate is moe._default_apply_gate and not own
