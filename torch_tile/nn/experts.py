# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture with frozen weights of few bits, or in float8 (arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_tile.diagnostics.arguments import explains_misfits, names_parameters
from torch_tile.kernels import kernels
from torch_tile.kernels.epilogue.program import evaluate
from torch_tile.nn.quantized import Frozen, FrozenProduct
from torch_tile.ops.checks import check_device, check_floating, check_size, check_tensors

E4M3 = torch.float8_e4m3fn
RUN = 128  # columns of a float8 activation that share a scale


@dataclass(frozen=True)
class Gate:
    """The function that joins the products of gate and up: `activation(gate) * up`, both clamped by `limit` if given.

    With `alpha`, it is gpt-oss's (arXiv:2508.10925): `gate * sigmoid(alpha * gate) * (up + 1)`.
    """

    activation: str = "silu"
    limit: float | None = None
    alpha: float | None = None

    def text(self, gate: str = "acc0", up: str = "acc1") -> str:
        """Return the epilogue of two products."""
        parts = []
        if self.limit is not None:
            parts += [f"g=min({gate},{self.limit!r})", f"t=max({up},{-self.limit!r})", f"u=min(t,{self.limit!r})"]
            gate, up = "g", "u"
        if self.alpha is None:
            return ";".join([*parts, f"a={self.activation}({gate})", f"y=mul(a,{up})", "ret y"])
        steps = f"q=mul({gate},{self.alpha!r});s=sigmoid(q);v=mul({gate},s);w=add({up},1.0);y=mul(v,w);ret y"
        return ";".join([*parts, steps])

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute it in plain torch, in float32."""
        return evaluate(self.text(), [gate.float(), up.float()], [])


@dataclass(frozen=True)
class Routes:
    """The rows of tokens sorted by their expert: the place of each among the routes, and where each expert's rows end.

    Routes to experts with numbers outside of those there are come last. Their products are 0.
    """

    order: Tensor
    offsets: Tensor
    each: int

    @staticmethod
    def of(experts: Tensor, count: int) -> Routes:
        """Sort the routes `[tokens, each]` to `count` experts."""
        flat = experts.reshape(-1)
        flat = torch.where((flat >= 0) & (flat < count), flat, count)
        ordered, order = flat.sort(stable=True)
        numbers = torch.arange(count, device=flat.device, dtype=flat.dtype)
        return Routes(order, torch.searchsorted(ordered, numbers, right=True).to(torch.int32), experts.shape[-1])

    def rows(self, x: Tensor) -> Tensor:
        """Gather rows of tokens `[tokens, ...]` in the order of routes."""
        return x[self.order // self.each]

    def combine(self, rows: Tensor) -> Tensor:
        """Sum rows of routes to those of tokens `[tokens, N]`."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.shape[0], device=rows.device)
        joined: Tensor = rows[inverse].unflatten(0, (-1, self.each)).sum(1)
        return joined


def _check(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, features: int) -> None:
    """Check the tensors that experts are called with, and their shapes."""
    check_tensors("experts", hidden_states=hidden_states, top_k_index=top_k_index, top_k_weights=top_k_weights)
    if top_k_index.is_floating_point():
        raise TypeError(f"top_k_index has dtype {top_k_index.dtype}; expected int64 or int32: numbers of experts")
    tokens, routes = hidden_states.shape[:1], top_k_index.shape[:1]
    if (
        hidden_states.dim() != 2 or top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape
        or tokens != routes
    ):  # fmt: skip
        found = f"{list(hidden_states.shape)}, {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
        raise ValueError(
            f"hidden_states, top_k_index and top_k_weights have shapes {found}; expected [T, K] and twice [T, experts]"
        )
    check_size("experts", "hidden_states", hidden_states, 1, features, "the columns of gate_up_proj")
    check_floating("experts", hidden_states=hidden_states, top_k_weights=top_k_weights)
    check_device("experts", "top_k_index", top_k_index, "hidden_states", hidden_states)


class QuantizedExperts(Frozen):
    """`down(gate(x) joined with up(x))` of each token's experts, weights of few bits widened in the kernels
    (`torch_tile.ops.grouped_dequant_gemm`).

    Gradients flow to the input, the routing weights and the biases.

    Args:
        gate_up_proj: words `[G, 2 I, K * bits / 8]`: rows of gate and up.
        gate_up_scales: `[G, 2 I, runs]`.
        down_proj: words `[G, K, I * bits / 8]`.
        down_scales: `[G, K, runs]`.
        gate_up_bias: `[G, 2 I]`, or None.
        down_bias: `[G, K]`, or None.
        gate: how the products of gate and up are joined.
        interleaved: whether rows of gate and up take turns; else all of gate come first.
        bits: of a weight.
        high_first: whether a byte's first column lies in its highest bits.
        offset: what is subtracted from every weight.
        format: "e2m1", "nf4", "fp4", or "" for integers.
    """

    gate_up_proj: Tensor
    gate_up_scales: Tensor
    down_proj: Tensor
    down_scales: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @names_parameters
    def __init__(
        self,
        gate_up_proj: Tensor,
        gate_up_scales: Tensor,
        down_proj: Tensor,
        down_scales: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        gate: Gate = Gate(),
        interleaved: bool = False,
        bits: int = 4,
        high_first: bool = False,
        offset: int = 0,
        format: str = "",
    ) -> None:
        super().__init__()
        held = {
            "gate_up_proj": gate_up_proj, "gate_up_scales": gate_up_scales, "down_proj": down_proj,
            "down_scales": down_scales,
        }  # fmt: skip
        _check_held("QuantizedExperts", held, bits)
        for name, tensor in held.items():
            self.register_buffer(name, tensor)
        for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
            self.register_parameter(name, None if bias is None else nn.Parameter(bias, bias.requires_grad))
        self.gate: Gate = gate
        self.interleaved: bool = interleaved
        self.format: str = format
        self.bits: int = bits
        self.high_first: bool = high_first
        self.offset: int = offset

    @explains_misfits
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map tokens `[T, K]`, the numbers of their experts and the weights of these `[T, experts]` to `[T, K]`.

        Experts with numbers that do not exist add nothing.
        """
        _check(hidden_states, top_k_index, top_k_weights, self.gate_up_proj.shape[2] * 8 // self.bits)
        routes = Routes.of(top_k_index, self.gate_up_proj.shape[0])
        rows, weights = routes.rows(hidden_states), top_k_weights.reshape(-1, 1)[routes.order]
        words, scales = self._halves(self.gate_up_proj), self._halves(self.gate_up_scales)
        aux, text = [], self.gate.text()
        if self.gate_up_bias is not None:
            aux = self._halves(self.gate_up_bias)
            text = f"ga=add(acc0,x0);up=add(acc1,x1);{self.gate.text('ga', 'up')}"
        inner = self._product(rows, words, scales, routes, aux, "g" * len(aux), text, rows.dtype)
        aux, kinds, text = [weights], "c", "y=mul(acc0,x0);ret y"
        if self.down_bias is not None:
            aux, kinds, text = [weights, self.down_bias], "cg", "v=add(acc0,x1);y=mul(v,x0);ret y"
        out = self._product(inner, [self.down_proj], [self.down_scales], routes, aux, kinds, text, torch.float32)
        return routes.combine(out).to(hidden_states.dtype)

    def _halves(self, x: Tensor) -> list[Tensor]:
        """View the rows of gate and of up."""
        return [x[:, 0::2], x[:, 1::2]] if self.interleaved else [*x.chunk(2, 1)]

    def _product(
        self,
        x: Tensor,
        words: list[Tensor],
        scales: list[Tensor],
        routes: Routes,
        aux: list[Tensor],
        kinds: str,
        text: str,
        dtype: torch.dtype,
    ) -> Tensor:
        """Multiply rows by their experts' matrices."""
        fields = self.bits, self.high_first, self.offset
        op = torch.ops.tile.grouped_dequant_gemm.default
        out: Tensor = op(x, words, scales, [], routes.offsets, *fields, aux, kinds, text, dtype, self.format)
        return out

    def extra_repr(self) -> str:
        """Say how the weights are stored."""
        groups, inner, _ = self.gate_up_proj.shape
        return (
            f"{groups} x ({self.down_proj.shape[1]}, {inner // 2}), {self.format or f'{self.bits} bits'}, {self.gate}"
        )


class Float8Experts(Frozen):
    """`down(gate(x) joined with up(x))` of each token's experts in float8, activations rounded as Float8Linear does
    (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    The gradient of the input is that of products with the widened weights, as if nothing were rounded; weights are
    frozen.

    Args:
        gate_up_proj: `[G, 2 I, K]` of float8, all rows of gate first.
        gate_up_scales: `[G, 1 or 2 I / 128 or 2 I, 1 or K / 128]`, rounded up.
        down_proj: `[G, K, I]` of float8.
        down_scales: likewise of `down_proj`.
        gate: how the products of gate and up are joined.
    """

    gate_up_proj: Tensor
    gate_up_scales: Tensor
    down_proj: Tensor
    down_scales: Tensor

    @names_parameters
    def __init__(
        self,
        gate_up_proj: Tensor,
        gate_up_scales: Tensor,
        down_proj: Tensor,
        down_scales: Tensor,
        *,
        gate: Gate = Gate(),
    ) -> None:
        super().__init__()
        held = {
            "gate_up_proj": gate_up_proj, "gate_up_scales": gate_up_scales, "down_proj": down_proj,
            "down_scales": down_scales,
        }  # fmt: skip
        _check_held("Float8Experts", held, 8)
        for name, tensor in held.items():
            self.register_buffer(name, tensor)
        self.gate = gate

    @explains_misfits
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map tokens `[T, K]`, the numbers of their experts and the weights of these `[T, experts]` to `[T, K]`.

        Experts with numbers that do not exist add nothing.
        """
        _check(hidden_states, top_k_index, top_k_weights, self.gate_up_proj.shape[2])
        routes = Routes.of(top_k_index, self.gate_up_proj.shape[0])
        product: Any = _Float8GroupedProduct.apply
        both = product(routes.rows(hidden_states), self.gate_up_proj, self.gate_up_scales, routes.offsets)
        inner = self.gate(*both.chunk(2, -1)).to(hidden_states.dtype)
        out = product(inner, self.down_proj, self.down_scales, routes.offsets)
        return routes.combine(out.float() * top_k_weights.reshape(-1, 1)[routes.order]).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """Return the shapes of weights and scales."""
        groups, inner, _ = self.gate_up_proj.shape
        sizes = f"{groups} x ({self.down_proj.shape[1]}, {inner // 2})"
        return f"{sizes}, scales={list(self.gate_up_scales.shape)}, {self.gate}"


def _check_held(layer: str, held: dict[str, Tensor], bits: int) -> None:
    """Raise ValueError for weights and scales whose shapes are no experts'."""
    both, _, down, _ = held.values()
    for name, tensor in held.items():
        if tensor.dim() != 3 or tensor.shape[0] != both.shape[0]:
            wanted = f"expected three dimensions, experts first, as gate_up_proj has shape {list(both.shape)}"
            raise ValueError(f"{layer}: {name} has shape {list(tensor.shape)}; {wanted}")
    columns, inner = (each.shape[2] * 8 // bits for each in (both, down))
    if both.shape[1] != 2 * inner or down.shape[1] != columns:
        shapes = f"gate_up_proj is [{both.shape[1]}, {columns}] and down_proj [{down.shape[1]}, {inner}]"
        raise ValueError(f"{layer}: of each expert, {shapes}; expected [2 I, K] and [K, I]")


class _Float8GroupedProduct(FrozenProduct):
    """The product of rows with their experts' matrices of Float8Experts."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
        """Round `x` and multiply."""
        wide = scale.to(torch.float32)
        a, scale_a = torch.ops.tile.quantize_fp8.default(x, RUN if scale.shape[-1] > 1 else 0, E4M3)
        op = torch.ops.tile.grouped_scaled_gemm.default
        out: Tensor = op(a, weight.mT, scale_a, wide.mT, offsets, [], "", "", x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Multiply by the widened weights."""
        weight, scale, offsets = ctx.saved_tensors
        spread, (rows, columns) = kernels("gemm.scaled").spread, weight.shape[1:]
        scales = torch.stack([spread(each, rows, columns) for each in scale.to(torch.float32)])
        wide = (weight.to(torch.float32) * scales).to(grad.dtype)
        found = torch.ops.tile.grouped_gemm.default(grad, [wide], offsets, [], "", "", grad.dtype)
        return found, None, None, None
