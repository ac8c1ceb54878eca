# SPDX-License-Identifier: Apache-2.0
"""`tile.attention`, `tile.attention_lse` and `tile.attention_backward`: scaled dot-product attention.

Where a gradient is wanted, the first one is the second one, which keeps its result and the log-sum-exp; the third one
computes the probabilities again from these, and keeps the gradients of scores where a mask wants its own. Gradients of
gradients are plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.kernels import kernels
from torch_tile.kernels.epilogue import parse
from torch_tile.kernels.memory_order import empty_beside
from torch_tile.kernels.positions import FAR
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import register

Size = checks.Size


INDICES = 4  # of a score: batch, head, query, key


def _check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, window: int,
    q_offset: Size, aux: Sequence[torch.Tensor], score: str,
) -> None:  # fmt: skip
    checks.check_floating("attention", q=q, k=k, v=v)
    checks.check_same_dtype("attention", q=q, k=k, v=v)
    checks.check_dims("attention", "q", q, 4, "[B, H, Sq, D]")
    checks.check_dims("attention", "k", k, 4, "[B, Hkv, Skv, D]")
    checks.check_dims("attention", "v", v, 4, "[B, Hkv, Skv, Dv]")
    checks.check_size("attention", "k", k, 0, q.shape[0], "q's batch")
    checks.check_size("attention", "k", k, 3, q.shape[3], "q's head dimension")
    for dim, what in enumerate(("k's batch", "k's heads", "k's length")):
        checks.check_size("attention", "v", v, dim, k.shape[dim], what)
    heads, kv_heads = q.shape[1], k.shape[1]
    require(
        heads == 0 if isinstance(kv_heads, int) and kv_heads == 0 else heads % kv_heads == 0,
        lambda: f"tile.attention: q has {heads} heads; expected a multiple of k's and v's {kv_heads}",
    )
    require_value(window >= 0, lambda: f"tile.attention: window is {window}; expected 0 (none) or a positive length")
    if isinstance(q_offset, int):  # a symbol is the difference of lengths, and no bound of it has to be guarded
        require_value(abs(q_offset) <= FAR, lambda: f"tile.attention: q_offset is {q_offset}; expected {-FAR} to {FAR}")
    if mask is not None:
        require_type(
            mask.dtype == torch.bool or mask.dtype in checks.FLOATING,
            lambda: f"tile.attention: mask has dtype {mask.dtype}; expected bool (True: visible) or a floating dtype",
        )
        checks.check_device("attention", "mask", mask, "q", q)
        checks.check_broadcasts("attention", "mask", mask, (q.shape[0], heads, q.shape[2], k.shape[2]))
    for i, x in enumerate(aux):
        require_type(
            x.dtype == torch.bool or x.dtype in checks.FLOATING,
            lambda: f"tile.attention: aux[{i}] has dtype {x.dtype}; expected bool (read as 0 or 1) or a floating dtype",  # noqa: B023
        )
        checks.check_device("attention", f"aux[{i}]", x, "q", q)
        checks.check_broadcasts("attention", f"aux[{i}]", x, (q.shape[0], heads, q.shape[2], k.shape[2]))
    require_value(
        not aux or bool(score), lambda: "tile.attention: aux is given, but score, which would read it, is empty"
    )
    parse(score, 1, len(aux), INDICES)


def _fake_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: Size = 0,
    aux: Sequence[torch.Tensor] | None = None,
    score: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v, mask, window, q_offset, aux or (), score)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_beside(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_attention(*args: Any) -> torch.Tensor:
    return _fake_attention_lse(*args)[0]


def _in_training(*args: Any) -> torch.Tensor:
    """The op that keeps what the backward needs."""
    out: torch.Tensor = torch.ops.tile.attention_lse.default(*args)[0]
    return out


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.window, ctx.q_offset, aux, ctx.score = inputs
    ctx.has_aux = aux is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, mask, *(aux or ()), *output)


def _attention_gradients(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None = None) -> tuple[Any, ...]:
    if ctx.score:
        return _with_score(ctx, grad)
    q, k, v, mask, out, lse = ctx.saved_tensors
    options = ctx.causal, ctx.scale, ctx.window, ctx.q_offset
    unread: tuple[Any, ...] = ([] if ctx.has_aux else None, None)
    keep = mask is not None and mask.is_floating_point() and ctx.needs_input_grad[3]
    # Gradients of gradients are computed from the inputs alone.
    known = out.detach(), lse.detach()
    *found, ds = torch.ops.tile.attention_backward.default(grad, q, k, v, *known, mask, *options, keep)
    of_mask = None
    if keep:
        of_mask = ds.to(torch.promote_types(ds.dtype, mask.dtype)).sum_to_size(mask.shape).to(mask.dtype)
    return *found, of_mask, None, None, None, None, *unread


def _fake_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    _check_backward(*args)
    keep = len(args) > 11 and args[11]
    made: tuple[torch.Tensor, ...] = kernels("attention_backward").empty_results(*args[1:4], keep)
    return made


def _check_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: Size = 0,
    keep: bool = False,
) -> None:
    _check_attention(q, k, v, mask, window, q_offset, (), "")
    checks.check_same_dtype("attention_backward", q=q, grad=grad, out=out)
    for name, x, dims in (("grad", grad, 4), ("out", out, 4), ("lse", lse, 3)):
        checks.check_dims("attention_backward", name, x, dims, "[B, H, Sq, Dv]" if dims == 4 else "[B, H, Sq]")
        for dim, what in enumerate(("q's batch", "q's heads", "q's length", "v's head dimension")[:dims]):
            checks.check_size("attention_backward", name, x, dim, (*q.shape[:3], v.shape[3])[dim], what)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    require_type(lse.dtype == sums, lambda: f"tile.attention_backward: lse has dtype {lse.dtype}; expected {sums}")


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, q, k, v, _, _, mask, *ctx.options, ctx.keep = inputs
    ctx.save_for_backward(grad, q, k, v, mask)


def _twice(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of gradients, by autograd of the reference; `out` and `lse` stand for what they were computed from."""
    saved: tuple[torch.Tensor | None, ...] = ctx.saved_tensors
    wanted = [
        n
        for n, (x, at) in enumerate(zip(saved, (0, 1, 2, 3, 6), strict=True))
        if x is not None and ctx.needs_input_grad[at]
    ]
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, as what one of them was computed from is no way for gradients here.
        given = [None if x is None else x.view_as(x) if twice else x.detach() for x in saved]
        leaves = [x.requires_grad_() for n in wanted if (x := given[n]) is not None]
        *found, ds = kernels("attention_backward").gradients(*given, *ctx.options)
        found = [new.to(x.dtype) for new, x in zip(found, saved[1:4], strict=True) if x is not None]
        found += [ds.to(found[0].dtype)] * ctx.keep
        made = torch.autograd.grad(found, leaves, grads[: len(found)], create_graph=twice, allow_unused=True)
    by_place = dict(zip(wanted, made, strict=True))
    grad, q, k, v, mask = map(by_place.get, range(5))
    return grad, q, k, v, None, None, mask, None, None, None, None, None


def _with_score(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Gradients where a text changes the scores, in plain torch."""
    from torch_tile.kernels import attention as family
    from torch_tile.kernels.gemm import compute_dtype

    q, k, v, mask, *aux, _, _ = ctx.saved_tensors
    compute = compute_dtype(q.dtype)
    scale = family.default_scale(q.shape[3]) if ctx.scale is None else ctx.scale
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    groups = heads // kv_heads if kv_heads else 1
    qc, kc, vc = (t.to(compute) for t in (q, k, v))
    rule = ctx.causal, scale, ctx.window, ctx.q_offset
    p, _ = family.softmax_with_lse(family.scores(qc, kc, mask, *rule, aux, ctx.score))

    shape = (batch, kv_heads, groups, q_len, kv_len)
    grouped_p, grouped_grad = p.reshape(shape), grad.to(compute).reshape(*shape[:4], v_dim)
    grad_v = torch.matmul(grouped_p.mT, grouped_grad).sum(2)
    grad_p = torch.matmul(grouped_grad, vc.unsqueeze(2).mT)
    grad_s = grouped_p * (grad_p - (grad_p * grouped_p).sum(-1, keepdim=True))
    grad_mask = None
    if mask is not None and mask.is_floating_point() and ctx.needs_input_grad[3]:
        grad_mask = grad_s.reshape(batch, heads, q_len, kv_len).sum_to_size(mask.shape).to(mask.dtype)
    product = family.scores(qc, kc, None, False, scale, 0, 0)
    grad_s, grad_aux = _through_score(ctx.score, product, aux, ctx.q_offset, grad_s.reshape(product.shape))
    grad_s = grad_s.reshape(shape)
    grad_q = torch.matmul(grad_s, kc.unsqueeze(2)).reshape(q.shape) * scale
    grad_k = torch.matmul(grad_s.mT, qc.reshape(*shape[:4], head_dim)).sum(2) * scale
    grads = grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
    return *grads, grad_mask, None, None, None, None, grad_aux if ctx.has_aux else None, None


def _through_score(
    text: str, product: torch.Tensor, aux: Sequence[torch.Tensor], q_offset: int, grad: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The gradient of scaled products `[B, H, Sq, Skv]` from that of the scores that `text` makes of them; and of aux.

    A score that the text hides has the gradient 0, also where a derivative is infinite there.
    """
    from torch_tile.kernels.epilogue import vjp
    from torch_tile.kernels.score import inputs

    hidden = grad == 0
    terms = vjp(text, inputs(product, aux, q_offset), grad)
    found = {name: g.expand_as(grad).masked_fill(hidden, 0.0) for name, g in terms.items()}
    grad_aux = []
    for i, x in enumerate(aux):
        g = found.get(f"x{i}") if x.is_floating_point() else None
        grad_aux.append(None if g is None else g.sum_to_size(x.shape).to(x.dtype))
    return found.get("acc0", torch.zeros_like(grad)), grad_aux


def _attention_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    # Like torch's formula for scaled_dot_product_attention, masked products are counted.
    batch, heads, q_len, head_dim = q
    return 2 * batch * heads * q_len * k[2] * (head_dim + v[3])


def _backward_flops(
    grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, out_shape: Any = None,
    **kwargs: Any,
) -> int:  # fmt: skip
    batch, heads, q_len, head_dim = q
    return 2 * batch * heads * q_len * k[2] * (3 * head_dim + 2 * v[3])


_PRECISION = ("q", "k", "v", "mask", "aux")
register(
    "attention",
    fake=_fake_attention,
    in_training=_in_training,
    lower_precision=_PRECISION,
    flops=_attention_flops,
)
register(
    "attention_lse",
    fake=_fake_attention_lse,
    backward=_attention_gradients,
    setup_context=_save_attention,
    lower_precision=_PRECISION,
    flops=_attention_flops,
)
register(
    "attention_backward",
    fake=_fake_backward,
    backward=_twice,
    setup_context=_save_backward,
    flops=_backward_flops,
)
