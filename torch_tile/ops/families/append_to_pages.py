# SPDX-License-Identifier: Apache-2.0
"""`tile.append_to_pages`, the one operator that changes its arguments: new keys and values go into pages in place.

It returns nothing and has no gradient, so that it is no declaration of the registry; torch makes it functional in
graphs.
"""

from __future__ import annotations

import re
from types import NoneType
from typing import Final

import torch
from torch import Tensor

from torch_tile.kernels import kernels
from torch_tile.kernels.attention.args import AppendArgs
from torch_tile.ops import checks
from torch_tile.ops.attention_common import check_most, check_pages, check_starts
from torch_tile.ops.checks import require, require_value
from torch_tile.ops.families.attention_paged import check_page_dtypes
from torch_tile.ops.registration import LIBRARY
from torch_tile.ops.registry import arguments_of, documented, form

OP = "append_to_pages"
WRITTEN = ("k_pages", "v_pages", "k_scale", "v_scale")
"""The arguments that are changed in place, or may be."""

append_to_pages: Final = form(
    OP,
    AppendArgs[Tensor],
    NoneType,
    """Write new keys and values into pages, in place, where `attention_paged` reads them.

Args:
    k: `[B, Sq, Hkv, D]`, or `[T, Hkv, D]` with cu_seqlens: the new keys, which are the last of each sequence.
    v: the new values, likewise, with Dv for D.
    k_pages: `[pages, page, Hkv, D]`, of k's dtype. No page that is written belongs to two sequences.
    v_pages: `[pages, page, Hkv, Dv]`.
    block_tables: int32 `[B, n]`: position `s` of sequence `b` lies in page `block_tables[b, s // page]`, row
        `s % page`.
    lengths: int32 `[B]`: the positions of each sequence, the new ones included.
    cu_seqlens: int32 `[B + 1]`: sequence b has the new rows from `cu_seqlens[b]` to `cu_seqlens[b + 1]`.
    max_seqlen: the most new rows that a sequence has, with cu_seqlens only. Rows beyond are not written.
    k_scale: for pages of float8_e4m3fn, float32: `k / k_scale` is written, at most 448 in magnitude. A tensor that
        broadcasts to `[pages, page, Hkv]` is read: `[1, 1, 1]` is one scale for all, `[1, 1, Hkv]` one for each
        head. One of exactly that shape is written, in place: the largest magnitude of each new row over 448, at
        least 2^-100.
    v_scale: the same of values.

Rounding to float8_e4m3fn changes a number by at most 2^-4 of itself, or 2^-10 scales. New rows that would stand
before the start of their sequence, and rows of no sequence, are left out. Values of
block_tables, lengths and cu_seqlens are checked on the CPU only; elsewhere pages that do not exist are not written.
Raises RuntimeError for shapes, devices and tensors that want gradients, TypeError for dtypes.
""",
)
documented(append_to_pages)


def _check(args: AppendArgs[Tensor]) -> None:
    """Check the arguments of `tile.append_to_pages`."""
    k, v, k_pages, v_pages, block_tables, lengths, cu_seqlens, max_seqlen, k_scale, v_scale = args
    checks.check_floating(OP, k=k, v=v)
    checks.check_same_dtype(OP, k=k, v=v)
    check_page_dtypes(OP, "k", k, k_pages, v_pages, k_scale, v_scale)
    ragged = cu_seqlens is not None
    checks.check_positions(OP, "block_tables", block_tables, 2, "[B, n]", k=k)
    checks.check_positions(OP, "lengths", lengths, 1, "[B]", k=k)
    batch = lengths.shape[0]
    checks.check_size(OP, "block_tables", block_tables, 0, batch, "as lengths")
    for name, new, pages, width in (("k", k, k_pages, "D"), ("v", v, v_pages, "Dv")):
        shape = f"[T, Hkv, {width}], as cu_seqlens is given" if ragged else f"[B, Sq, Hkv, {width}]"
        checks.check_dims(OP, name, new, 3 if ragged else 4, shape)
        checks.check_dims(OP, f"{name}_pages", pages, 4, f"[pages, page, Hkv, {width}]")
        for dim in (-2, -1):
            checks.check_size(OP, f"{name}_pages", pages, dim, new.shape[dim], f"as {name}")
    checks.check_sizes(OP, "v", v, k.shape[:-1], "as k")
    checks.check_sizes(OP, "v_pages", v_pages, k_pages.shape[:2], "as k_pages")
    if cu_seqlens is None:
        checks.check_size(OP, "k", k, 0, batch, "the sequences of lengths")
    else:
        checks.check_positions(OP, "cu_seqlens", cu_seqlens, 1, "[B + 1]", k=k)
        checks.check_size(OP, "cu_seqlens", cu_seqlens, 0, batch + 1, "the sequences of lengths and one more")
    check_most(OP, "max_seqlen", max_seqlen)
    if cu_seqlens is None and isinstance(max_seqlen, int):
        require_value(
            max_seqlen == 0, lambda: f"tile.{OP}: max_seqlen is {max_seqlen}; expected 0, as cu_seqlens is not given"
        )


def _run(args: AppendArgs[Tensor]) -> None:
    """Launch `tile.append_to_pages`."""
    _check(args)
    table, lengths = ("block_tables", args.block_tables), ("lengths", args.lengths)
    check_pages(OP, args.k_pages.shape[:2], table, lengths)
    if args.cu_seqlens is not None:
        check_starts(OP, "cu_seqlens", args.cu_seqlens, args.max_seqlen, args.k.shape[0], "k")
    kernels("attention.paged").append_to_pages(args)


def _without_gradient(keys: torch._C.DispatchKeySet, *args: object) -> None:
    """Refuse tensors that want gradients, since what is written into pages is cut off from its gradient."""
    wanted = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    require(
        not (wanted and torch.is_grad_enabled()),
        lambda: f"tile.{OP}: a tensor wants a gradient; expected none, or a call under torch.no_grad()",
    )
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.tile.append_to_pages.default.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _schema() -> str:
    """Return the schema of the arguments, which marks those that are written."""
    schema = arguments_of(AppendArgs)
    for mark, name in zip("abcd", WRITTEN, strict=True):
        schema = re.sub(rf"Tensor(\?? {name}\b)", rf"Tensor({mark}!)\1", schema)
    return f"{schema} -> ()"


LIBRARY.define(OP + _schema(), tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl(OP, lambda *args: _run(AppendArgs(*args)), "CompositeExplicitAutograd")
LIBRARY.impl(OP, _without_gradient, "Autograd", with_keyset=True)
torch.library.register_fake(f"tile::{OP}", lambda *args: _check(AppendArgs(*args)), lib=LIBRARY)
