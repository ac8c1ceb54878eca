# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: write out calls that hide attention, norms and products in one node, so that these can be captured.

torch's encoder layer has a fused call for inference. `nn.MultiheadAttention` is one call to Dynamo. Attention over
other ranks than four is decomposed before any pass can see it.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import aten, is_tensor, known, val
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.select import cost_rules


def encoder_layer(
    x: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """Compute `torch._transformer_encoder_layer_fwd` by torch's own operators, for x [batch, length, embed_dim]."""
    keep = None
    if mask is not None:  # true (not 0) hides; [S, S], [batch, S], or [batch, heads, S, S]
        keep = ~mask.bool()
        keep = keep[:, None, None, :] if mask_type == 1 else keep

    def attend(h: torch.Tensor) -> torch.Tensor:
        qkv = F.linear(h, qkv_weight, qkv_bias).unflatten(-1, (3, heads, embed_dim // heads))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return F.linear(F.scaled_dot_product_attention(q, k, v, keep).transpose(1, 2).flatten(2), out_weight, out_bias)

    def feed_forward(h: torch.Tensor) -> torch.Tensor:
        h = F.linear(h, weight1, bias1)
        return F.linear(F.gelu(h) if use_gelu else F.relu(h), weight2, bias2)

    def norm(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(h, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = x + attend(norm(x, norm1_weight, norm1_bias))
        return x + feed_forward(norm(x, norm2_weight, norm2_bias))
    x = norm(x + attend(x), norm1_weight, norm1_bias)
    return norm(x + feed_forward(x), norm2_weight, norm2_bias)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `F.scaled_dot_product_attention` of any rank, with broadcast batches, as attention of rank 4."""
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    four = (math.prod(lead[:-1]), lead[-1]) if len(lead) > 1 else (*lead, *(1 for _ in range(2 - len(lead))))

    def view(x: torch.Tensor) -> torch.Tensor:
        return x.expand(*lead, *x.shape[-2:]).reshape(*four, *x.shape[-2:])

    if attn_mask is not None and attn_mask.dim() > 2:
        attn_mask = view(attn_mask)
    out = F.scaled_dot_product_attention(
        view(query), view(key), view(value), attn_mask, dropout_p, is_causal, scale=scale
    )
    return out.reshape(*lead, *out.shape[-2:])


def _always(args: Any, kwargs: Any) -> bool:
    """Accept every call, whatever its arguments."""
    return True


def _padded(args: Any, kwargs: Any) -> bool:
    """Return whether the encoder layer's input is batched and dense."""
    x = val(args[0])
    return bool(x.dim() == 3 and not x.is_nested)


def _is_broadcast_attention(args: Any, kwargs: Any) -> bool:
    """Return whether attention broadcasts batches or heads, or has another rank than 4, without grouped heads."""
    named = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    if named.get("enable_gqa") or not all(is_tensor(named.get(n)) for n in ("query", "key", "value")):
        return False
    q, k, v = (val(named[n]) for n in ("query", "key", "value"))
    if any(x.dim() != 4 for x in (q, k, v)):
        return all(bool(x.dim() >= 2) for x in (q, k, v))
    heads = all(known(x.shape[1] == q.shape[1]) or known(x.shape[1] == 1) for x in (k, v))
    return heads and not (all(known(x.shape[0] == q.shape[0]) for x in (k, v)) and known(k.shape[1] == v.shape[1]))


def _why_kept(node: Node) -> str:
    """Return the reason to keep a fused call; empty if its parts may be faster."""
    return cost_rules.in_fused_layer(node) if node.target is torch._transformer_encoder_layer_fwd else ""


HIDING: dict[Any, tuple[Callable[[Any, Any], bool], Callable[..., Any]]] = {
    torch._transformer_encoder_layer_fwd: (_padded, encoder_layer),
    F.multi_head_attention_forward: (_always, F.multi_head_attention_forward),
    F.scaled_dot_product_attention: (_is_broadcast_attention, attention),
    aten.scaled_dot_product_attention.default: (_is_broadcast_attention, attention),
}


@family(None, "pre_grad", 10)
def write_out(context: Context) -> None:
    """Replace every such call by its operations; a call that cannot be traced stays."""
    for node in list(context.graph.nodes):
        applies, meaning = HIDING.get(node.target, (None, None)) if node.op == "call_function" else (None, None)
        if applies is None or meaning is None or not applies(node.args, node.kwargs):
            continue
        tensors = [val(n) for n in node.all_input_nodes if is_tensor(n)]
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wants_gradient and context.settings.select == "fastest":
            continue  # nothing in it would be captured
        if context.settings.select == "fastest" and not context.settings.thorough and (why := _why_kept(node)):
            context.note("attention", report.KEPT, "an encoder layer in one call", node, why)
            continue
        try:
            _inline(node, _trace(node, meaning))
        except Exception:
            report.log.debug("%s stays one call", node.target, exc_info=True)


def _trace(node: Node, meaning: Callable[..., Any]) -> GraphModule:
    """Trace the operations of a call. Operations that torch would decompose later stay whole."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = node.all_input_nodes

    def call(*values: Any) -> Any:
        env = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        return meaning(*args, **kwargs)

    values = [val(n) for n in inputs]
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor)]
    with modes[0] if modes else contextlib.nullcontext():
        return make_fx(call, pre_dispatch=True)(*values)


def _inline(node: Node, traced: GraphModule) -> None:
    """Insert traced operations in the place of a call."""
    graph = node.graph
    holes = list(traced.graph.find_nodes(op="placeholder"))
    results: Any = traced.graph.output_node().args[0]
    several = isinstance(results, list | tuple)
    wanted: list[tuple[Node, Any]] = [(u, u.args[-1]) for u in node.users] if several else []
    if any(u.target is not operator.getitem or results[i] is None for u, i in wanted):
        raise ValueError("the outputs are used together")
    if list(traced.graph.find_nodes(op="get_attr")):
        raise ValueError("it holds constants")
    env: dict[Node, Node] = dict(zip(holes, node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = new = graph.node_copy(inner, env.__getitem__)
                new.meta.update({k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")})
    for old, result in [(u, results[i]) for u, i in wanted] if several else [(node, results)]:
        new = env[result]
        new.meta["example_value"] = val(old)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    if several:
        graph.erase_node(node)
