# SPDX-License-Identifier: Apache-2.0
"""Attention with all options of the layers here, and rotary embeddings."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from torch_tile.diagnostics.arguments import Window, explains_misfits, renames
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.epilogue.program import soft_cap
from torch_tile.ops.attention_common import check_batched
from torch_tile.ops.checks import (
    check_auxiliary,
    check_broadcasts,
    check_device,
    check_dims,
    check_floating,
    check_size,
    require_value,
)
from torch_tile.ops.losses import is_in_autocast

Tensor = torch.Tensor
log: logging.Logger = logging.getLogger("torch_tile")
_told: set[str] = set()


@explains_misfits
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = 0,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute scaled dot-product attention whose last query is at the last key, as with a KV cache.

    Dropout, and sinks that need a gradient, are computed by plain torch, which is logged once for each.

    Args:
        q: `[B, H, Sq, D]`.
        k: `[B, Hkv, Skv, D]`, H a multiple of Hkv.
        v: `[B, Hkv, Skv, Dv]`.
        mask: broadcastable to `[B, H, Sq, Skv]`, bool (True: visible) or floating (added). It is used together with
            `causal` and `window`, not instead of them.
        causal: query `i` sees the keys `j <= i + Skv - Sq`.
        scale: of the scores; default `D ** -0.5`.
        window: if positive, query `i` sees only the keys `j > i + Skv - Sq - window`; 0 and None mean all.
        dropout: probability of dropping a weight.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118); 0.0 and None mean no cap.
        sinks: `[H]`, a score of each head that takes part in the softmax and brings no value (arXiv:2309.17453); or
            one for all heads.

    Returns:
        `[B, H, Sq, Dv]` in q's dtype.
    """
    for name, x in (("q", q), ("k", k)):
        check_dims("attend", name, x, 4, "[B, H, S, D]")
    offset, window = k.shape[2] - q.shape[2], int(window or 0)
    if dropout:
        _warn_once("dropout")
        return _plain(q, k, v, mask, causal, scale, window, dropout, softcap, sinks)
    cap = None, text_of_cap(softcap)
    if sinks is None:
        out: Tensor = torch.ops.tile.attention.default(q, k, v, mask, causal, scale, window, offset, *cap)
        return out
    if _sinks_want_gradients(q, k, v, sinks):
        _warn_once(SINKS)
        return _plain(q, k, v, mask, causal, scale, window, dropout, softcap, sinks)
    out, lse = torch.ops.tile.attention_lse.default(q, k, v, mask, causal, scale, window, offset, *cap)
    return with_sinks(out.transpose(1, 2), lse.transpose(1, 2), sinks).transpose(1, 2)


@explains_misfits
@renames(cu_seqlens_q="q_starts", cu_seqlens_k="k_starts", max_seqlen_q="most_queries", max_seqlen_k="most_keys")
def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = 0,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attend` for sequences that lie one after the other; the last query of each is at its last key.

    Args:
        q: `[Tq, H, D]`.
        k: `[Tk, Hkv, D]`.
        v: `[Tk, Hkv, Dv]`.
        q_starts: int32 `[n + 1]`, where the queries of each sequence begin, and where the last ones end.
        k_starts: the same of keys.
        most_queries: that a sequence has.
        most_keys: that a sequence has.
        causal: as in `attend`, of each sequence, and so are the options that follow.
        scale: of the scores.
        window: how many keys a query sees, 0 or None for all.
        dropout: probability of dropping a weight.
        softcap: bound of the scores.
        sinks: `[H]`.

    Returns:
        `[Tq, H, Dv]` in q's dtype. Rows of no sequence are 0.
    """
    window = int(window or 0)
    if dropout or _sinks_want_gradients(q, k, v, sinks):
        _warn_once("dropout" if dropout else SINKS)
        seen = visible(q_starts, k_starts, q.shape[0], k.shape[0], causal, window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return _plain(q, k, v, seen, False, scale, 0, dropout, softcap, sinks)[0].transpose(0, 1).contiguous()
    score = text_of_cap(softcap)
    given = (q, k, v, q_starts, k_starts, most_queries, most_keys, causal, scale, window, None, score)
    if sinks is None:
        out: Tensor = torch.ops.tile.attention_varlen.default(*given)
        return out
    out, lse = torch.ops.tile.attention_varlen_lse.default(*given)
    return with_sinks(out, lse.mT, sinks)


@explains_misfits
def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention with sinks, `[H]` or one for all, from attention without `[..., H, Dv]` and its log-sum-exp.

    The log-sum-exp is `[..., H]`.

    With the sink the denominator grows from exp(lse) to exp(lse) + exp(sink).
    """
    if not torch.compiler.is_compiling():
        check_device("attention", "lse", lse, "out", out)
        check_broadcasts("attention", "lse", lse, out.shape[:-1], "out without its last dimension")
    _check_sinks(sinks, lse.shape[-1], out)
    return out * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None].to(out.dtype)


def _check_sinks(sinks: Tensor, heads: int, like: Tensor) -> None:
    """Refuse sinks that are not floats `[H]`, or on another device."""
    if not torch.compiler.is_compiling():
        check_floating("attention", sinks=sinks)
        check_device("attention", "sinks", sinks, "q", like)
        check_broadcasts("attention", "sinks", sinks, [heads], "the heads of q")


def text_of_cap(softcap: float | None) -> str:
    """Return the text of a soft cap of scores, "" for None and 0."""
    if not softcap:
        return ""
    require_value(
        0 < softcap < math.inf, lambda: f"tile.attention: softcap is {softcap}; expected a positive number or None"
    )
    return soft_cap(softcap)


def visible(q_starts: Tensor, k_starts: Tensor, queries: int, keys: int, causal: bool, window: int) -> Tensor:
    """Return the mask of sequences that lie one after the other, bool `[Tq, Tk]`."""
    count = q_starts.shape[0] - 1
    row, key = (torch.arange(n, device=q_starts.device) for n in (queries, keys))
    q_of, k_of = (
        torch.searchsorted(x[1:].contiguous(), n.int(), right=True) for x, n in ((q_starts, row), (k_starts, key))
    )
    # Behind the last sequence a row has no number of its own.
    place = key - torch.nn.functional.pad(k_starts, (0, 1))[k_of]
    ends = torch.nn.functional.pad(k_starts.diff() - q_starts[1:], (0, 1))[q_of]
    own = (row + ends)[:, None]
    seen = (q_of[:, None] == k_of) & (k_of < count)
    if causal:
        seen = seen & (place <= own)
    return seen & (place > own - window) if window else seen


SINKS = "sinks in training"


def _sinks_want_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Return whether sinks take part in training: the log-sum-exp of our kernels has no gradient."""
    return sinks is not None and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, sinks))


def check_hidden_states(layer: torch.nn.Module, hidden_states: Tensor, projection: torch.nn.Module) -> None:
    """Check the input of an attention layer, `[B, S, hidden_size]`, which a projection takes."""
    owner, size = type(layer).__name__, getattr(projection, "in_features", None)
    check_dims(owner, "hidden_states", hidden_states, 3, "[B, S, hidden_size]")
    if isinstance(size, int):
        check_size(owner, "hidden_states", hidden_states, 2, size, "hidden_size")


def _warn_once(what: str) -> None:
    """Warn once that plain torch computes attention with this feature."""
    if not torch.compiler.is_compiling() and what not in _told:
        _told.add(what)
        log.warning("attention with %s is computed by plain torch, not by a tile kernel", what)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window: int,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute `attend` in plain torch, in float32 or better. What the operator refuses is refused."""
    if not torch.compiler.is_compiling():
        require_value(0.0 <= dropout <= 1.0, lambda: f"attend: dropout is {dropout}; expected 0.0 to 1.0")
        if not is_in_autocast(q):  # which makes dtypes alike for the operator
            check_batched("attention", AttentionArgs(q, k, v, window=window))
    wide = torch.promote_types(q.dtype, torch.float32)
    groups, sq, skv = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    if mask is not None:
        check_auxiliary("attention", "mask", mask, "q", q)
        check_broadcasts("attention", "mask", mask, [*q.shape[:3], skv])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (t.repeat_interleave(groups, dim=1).to(wide) for t in (k, v))
    scores = q.to(wide) @ k.mT * scale
    if softcap:
        text_of_cap(softcap)  # refuses one that is not positive
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(sq, device=q.device)[:, None] + (skv - sq)
    j = torch.arange(skv, device=q.device)
    if causal:
        scores = scores.masked_fill(j > i, float("-inf"))
    if window > 0:
        scores = scores.masked_fill(j <= i - window, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        _check_sinks(sinks, q.shape[1], q)
        scores = torch.cat(
            [scores, sinks.to(wide).expand(q.shape[1])[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1
        )
    if not scores.shape[-1]:  # no key: a sum of nothing
        return (scores @ v).to(q.dtype)
    empty = scores.amax(-1, keepdim=True) == float("-inf")
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    weights = torch.dropout(weights, dropout, dropout > 0)
    return (weights[..., :skv] @ v).to(q.dtype)


@explains_misfits
def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Apply the rotary position embedding (RoFormer, arXiv:2104.09864).

    Args:
        x: `[B, H, S, R]`.
        cos: `[B, S, R]`, `[1, S, R]` or `[S, R]`, each angle twice: `cat([a, a])`.
        sin: as cos.
        interleaved: whether the pairs of x are `(0, 1), (2, 3), ...` instead of `(0, R/2), (1, R/2 + 1), ...`; the
            result has them in the second order either way.

    Returns:
        `[B, H, S, R]`.
    """
    if not torch.compiler.is_compiling():
        check_dims("rotate", "x", x, 4, "[B, H, S, R]")
        check_floating("rotate", x=x, cos=cos, sin=sin)
        for name, angles in (("cos", cos), ("sin", sin)):
            if angles.dim() != 2:
                check_dims("rotate", name, angles, 3, "[B, S, R], [1, S, R] or [S, R]")
            if angles.shape[-2] > x.shape[2]:
                fix = f"give the angles of x's positions, {name}[..., start : start + {x.shape[2]}, :]"
                wanted = f"expected {x.shape[2]}, x's length: {fix}"
                raise RuntimeError(f"rotate: {name} has {angles.shape[-2]} positions {list(angles.shape)}; {wanted}")
            check_broadcasts("rotate", name, angles, (x.shape[0], *x.shape[2:]), "[B, S, R] of x")
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    if interleaved:
        x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def __getattr__(name: str) -> Any:
    """Name the nearest function for a name that is not there."""
    from torch_tile.diagnostics.spelling import missing_name

    raise missing_name(__name__, name, [each for each, own in globals().items() if callable(own) and each.islower()])
