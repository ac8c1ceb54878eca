# SPDX-License-Identifier: Apache-2.0
"""What became of the captured ops: kept as tile kernels, or put back as the ATen that Inductor would have seen.

Runs last. A captured op of a family that the user left out, or one that loses against Inductor, is expanded; so is
nothing else. Then every product, norm or attention still in the graph is reported as missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from torch_tile.inductor import compat
from torch_tile.inductor.driver import Context
from torch_tile.inductor.graph.nodes import TIMES, Miss, aten, dtype, is_call, shape, val
from torch_tile.inductor.patterns.attention import rewrite
from torch_tile.inductor.patterns.gemm.epilogue import PRODUCTS
from torch_tile.inductor.patterns.norm import fused_norm
from torch_tile.inductor.report import rows as report


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: Any = 0,
    aux: Sequence[torch.Tensor] | None = None,
    score: str = "",
) -> torch.Tensor:
    """`tile.attention` in torch's own terms."""
    at_zero = isinstance(q_offset, int) and q_offset == 0
    plain_causal = causal and not window and at_zero and mask is None and not score
    if not plain_causal and (causal or window):
        keys = torch.arange(k.shape[2], device=q.device)
        queries = torch.arange(q.shape[2], device=q.device)[:, None] + q_offset
        keep = keys <= queries if causal else keys == keys
        if window:
            keep = keep & (keys > queries - window)
        if mask is None:
            mask = keep
        elif mask.dtype == torch.bool:
            mask = mask & keep
        else:
            mask = torch.where(keep, mask, -torch.inf)
    if score:
        return _with_scores(q, k, v, mask, scale, q_offset, aux or (), score)
    heads = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, plain_causal, scale=scale, **heads)


def _with_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None, q_offset: Any,
    aux: Sequence[torch.Tensor], score: str,
) -> torch.Tensor:  # fmt: skip
    """Attention written out, as models do whose scores are modified."""
    from torch_tile.kernels.attention.forward import default_scale
    from torch_tile.kernels.attention.score_mod import modified

    groups = q.shape[1] // k.shape[1]
    k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
    scale = default_scale(q.shape[3]) if scale is None else scale
    s = modified(score, torch.matmul(q, k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale, aux, q_offset)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    empty = (s == -torch.inf).all(-1, keepdim=True)
    return torch.matmul(torch.softmax(s, -1).masked_fill(empty, 0.0).to(v.dtype), v)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> torch.Tensor:
    """`tile.rms_norm` in torch's own terms."""
    h = x if x.dtype == torch.float64 else x.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if cast_first:
        return (weight + weight_offset) * y.to(x.dtype) if weight_offset else weight * y.to(x.dtype)
    scale = weight.to(h.dtype)
    return (y * (scale + weight_offset if weight_offset else scale)).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """`tile.layer_norm` in torch's own terms."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tile.softmax` in torch's own terms."""
    return F.softmax(x, dim, dtype=dtype)


REFERENCES: dict[Any, tuple[str, Callable[..., torch.Tensor]]] = {
    torch.ops.tile.attention.default: ("attention", sdpa),
    torch.ops.tile.rms_norm.default: ("norm", rms_norm),
    torch.ops.tile.layer_norm.default: ("norm", layer_norm),
    torch.ops.tile.softmax.default: ("softmax", softmax),
}


IN_TRAINING = torch.ops.tile.attention_lse.default, torch.ops.tile.attention_backward.default
"""Decided on before autograd."""


def settle(context: Context) -> None:
    """Decide on every captured op, report it, and expand those that stay with Inductor."""
    for node in list(context.graph.nodes):
        captured = is_call(node, *IN_TRAINING) and node not in context.handled
        if captured and "attention" in context.settings.families:
            what = f"{node.target}".removesuffix(".default") + rewrite.signature(node)
            times = node.meta.get(TIMES)
            context.note("attention", report.REPLACED, what, node, str(times or ""), [node], times)
        family, reference = REFERENCES.get(node.target, (None, None))
        if family is None or reference is None or (_settled(context, node) and node not in context.left):
            continue
        what = f"{node.target}".removesuffix(".default") + _signature(node)
        if node in context.left or family not in context.settings.families:
            context.handled.update(expand(node, reference))
            continue
        on_rows = family in ("norm", "softmax")
        if on_rows and fused_norm.left_to_inductor(context, what, node, node.all_input_nodes[0], node, family):
            context.handled.update(expand(node, reference))
        elif why := context.refused([node]):
            context.note(family, report.KEPT, what, node, why, [node])
            context.handled.update(expand(node, reference))
        elif context.settings.select == "fastest":
            from torch_tile.inductor.select.decide import compete_captured

            outcome = compete_captured(node, reference, context.settings)
            status = report.REPLACED if outcome.tile_wins else report.KEPT
            context.note(family, status, what, node, str(outcome), [node], outcome)
            if not outcome.tile_wins:
                context.handled.update(expand(node, reference))
        else:
            context.note(family, report.REPLACED, what, node, "", [node])


def _settled(context: Context, node: Node) -> bool:
    """Whether a node was made by a match. A softmax that is no attention is only reported so far."""
    row = context.rows.get(node)
    return node in context.handled and not (row is not None and row.status == report.MISSED)


def _signature(node: Node) -> str:
    if is_call(node, torch.ops.tile.attention.default):
        return rewrite.signature(node)
    shapes = ", ".join(str(list(shape(n))) for n in node.args if isinstance(n, Node))
    return f"({shapes})"


def expand(node: Node, reference: Callable[..., torch.Tensor]) -> list[Node]:
    """Put the ATen of `reference` in place of a captured op; returns the new nodes."""
    traced = trace_reference(node, reference)
    inputs = node.all_input_nodes
    env: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    graph = node.graph
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, lambda n: env[n])
                for key in ("nn_module_stack", "stack_trace"):
                    if key in node.meta:
                        env[inner].meta[key] = node.meta[key]
            elif inner.op == "get_attr":
                env[inner] = _literal(node, getattr(traced, str(inner.target)))
            elif inner.op == "output":
                node.replace_all_uses_with(env[inner.args[0]])
    graph.erase_node(node)
    return [n for n in env.values() if n not in inputs]


def _literal(before: Node, tensor: torch.Tensor) -> Node:
    """A tensor constant of a traced reference: always a scalar such as -inf."""
    if tensor.numel() != 1:
        raise ValueError("a reference made a tensor constant that is not a scalar")
    with before.graph.inserting_before(before):
        new = before.graph.call_function(
            aten.full.default, ([], tensor.item()), {"dtype": tensor.dtype, "device": tensor.device}
        )
    new.meta["val"] = val(before).new_empty((), dtype=tensor.dtype)
    return new


def trace_reference(node: Node, reference: Callable[..., torch.Tensor]) -> GraphModule:
    """The reference's functional ATen, decomposed as Inductor does, on the node's inputs."""
    from torch._inductor.virtualized import V

    inputs = node.all_input_nodes

    def call(*values: Any) -> torch.Tensor:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return reference(*args, **kwargs)

    with V.fake_mode, torch.no_grad():
        return compat.decomposed(call, [val(n) for n in inputs])


WATCHED = {
    "gemm": PRODUCTS,
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ),
    "norm": (aten.native_layer_norm.default, aten._fused_rms_norm.default),
    "softmax": (aten._softmax.default,),
}

ADVICE = {
    "gemm": "nothing in the model is wrong: please report the graph",
    "attention": "call F.scaled_dot_product_attention",
    "norm": 'in training give options={"select": "tile"}; otherwise normalise over the last dimension alone',
    "softmax": "reduce over one dimension of a floating tensor",
}


def report_missed(context: Context) -> None:
    """Say of every subgraph of a wanted family that is still there that nothing took it."""
    for node in context.graph.nodes:
        for family, targets in WATCHED.items():
            if family in context.settings.families and is_call(node, *targets) and node not in context.handled:
                context.miss(family, node, Miss(f"no rule for it here ({_types(node)})", ADVICE[family]))


def _types(node: Node) -> str:
    value = val(node)
    return f"{dtype(node)}" if isinstance(value, torch.Tensor) else "several outputs"
