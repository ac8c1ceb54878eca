# SPDX-License-Identifier: Apache-2.0
"""`tile.attention`, `tile.attention_lse` and `tile.attention_backward`: scaled dot-product attention.

Where a gradient is wanted, the first one is the second one, which keeps its result and the log-sum-exp; the third one
computes the probabilities again from these, and keeps what it finds for each score where a mask or an operand of a text
wants its own gradient. Gradients of gradients are plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.kernels import kernels
from torch_tile.kernels.attention.memory_order import empty_beside
from torch_tile.kernels.attention.positions import FAR
from torch_tile.kernels.epilogue.program import parse
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
    q, k, v, mask, *aux, out, lse = ctx.saved_tensors
    wanted = {"mask": (mask, mask is not None and ctx.needs_input_grad[3])}
    if ctx.has_aux:
        wanted |= {f"x{n}": each for n, each in enumerate(zip(aux, ctx.needs_input_grad[8], strict=True))}
    keep = [name for name, (x, needed) in wanted.items() if needed and x is not None and x.is_floating_point()]
    options = mask, ctx.causal, ctx.scale, ctx.window, ctx.q_offset
    more = ",".join(keep), aux if ctx.has_aux else None, ctx.score
    # Gradients of gradients are computed from the inputs alone.
    *found, kept = torch.ops.tile.attention_backward.default(grad, q, k, v, out.detach(), lse.detach(), *options, *more)
    of = {name: _summed(full, wanted[name][0]) for name, full in zip(keep, kept, strict=True)}
    of_aux = [of.get(f"x{n}") for n in range(len(aux))] if ctx.has_aux else None
    return *found, of.get("mask"), None, None, None, None, of_aux, None


def _summed(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of an operand from that of what it was expanded to."""
    return full.to(torch.promote_types(full.dtype, like.dtype)).sum_to_size(like.shape).to(like.dtype)


def _fake_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    _check_backward(*args)
    keep = args[11] if len(args) > 11 else ""
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
    keep: str = "",
    aux: Sequence[torch.Tensor] | None = None,
    score: str = "",
) -> None:
    _check_attention(q, k, v, mask, window, q_offset, aux or (), score)
    known = [*(["mask"] if mask is not None else []), *(f"x{n}" for n in range(len(aux or ())))]
    require_value(
        not keep or set(keep.split(",")) <= set(known),
        lambda: f"tile.attention_backward: keep is {keep!r}; expected some of {known}, joined by commas",
    )
    checks.check_same_dtype("attention_backward", q=q, grad=grad, out=out)
    for name, x, dims in (("grad", grad, 4), ("out", out, 4), ("lse", lse, 3)):
        checks.check_device("attention_backward", name, x, "q", q)
        checks.check_dims("attention_backward", name, x, dims, "[B, H, Sq, Dv]" if dims == 4 else "[B, H, Sq]")
        for dim, what in enumerate(("q's batch", "q's heads", "q's length", "v's head dimension")[:dims]):
            checks.check_size("attention_backward", name, x, dim, (*q.shape[:3], v.shape[3])[dim], what)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    require_type(lse.dtype == sums, lambda: f"tile.attention_backward: lse has dtype {lse.dtype}; expected {sums}")


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, q, k, v, _, _, mask, *ctx.options, aux, ctx.score = inputs
    ctx.has_aux = aux is not None
    ctx.save_for_backward(grad, q, k, v, mask, *(aux or ()))


def _twice(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of gradients, by autograd of the reference; `out` and `lse` stand for what they were computed from."""
    saved: tuple[torch.Tensor | None, ...] = ctx.saved_tensors
    needed = [x is not None and ctx.needs_input_grad[at] for x, at in zip(saved[:5], (0, 1, 2, 3, 6), strict=True)]
    needed += ctx.needs_input_grad[12] if ctx.has_aux else []
    wanted = [n for n, x in enumerate(saved) if needed[n] and x is not None and x.is_floating_point()]
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, as what one of them was computed from is no way for gradients here.
        given = [None if x is None else x.view_as(x) if twice else x.detach() for x in saved]
        leaves = [x.requires_grad_() for n in wanted if (x := given[n]) is not None]
        *found, kept = kernels("attention_backward").gradients(*given[:5], *ctx.options, given[5:], ctx.score)
        found = [new.to(x.dtype) for new, x in zip(found, saved[1:4], strict=True) if x is not None]
        found += [kept.to(found[0].dtype)] * bool(len(kept))
        made = torch.autograd.grad(found, leaves, grads[: len(found)], create_graph=twice, allow_unused=True)
    by_place = dict(zip(wanted, made, strict=True))
    grad, q, k, v, mask, *aux = map(by_place.get, range(len(saved)))
    return grad, q, k, v, None, None, mask, None, None, None, None, None, aux if ctx.has_aux else None, None


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
