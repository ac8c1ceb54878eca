# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values in pages, for decoding and for prefilling by chunks, and what writes into the pages.

The kernel is that of dense sequences (forward.py), compiled for keys in pages (sequences.py); queries are dense or
ragged. Keys may be split: each split of a sequence takes its share of the sequence's own keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention import forward, padded
from torch_tile.kernels.attention.args import AppendArgs, PagedArgs, dense_args
from torch_tile.kernels.attention.arguments import empty_beside, placed_beside
from torch_tile.kernels.attention.scaled_keys import E4M3, Scales, widened
from torch_tile.kernels.attention.sequences import Layout, Sequences
from torch_tile.kernels.attention.varlen import by_head
from torch_tile.kernels.common import (
    compute_dtype,
    dense_last,
    entry_function,
    has_kernels,
    is_unit,
    machine_of,
    strided,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.norm.quantize import LARGEST, LEAST, rounded


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.attention_paged` and its lse in float32 (float64 for float64), from `PagedArgs`.

    The keys and values of float8 pages are their products with their scales, rounded to q's dtype.
    """
    args: PagedArgs[torch.Tensor] = PagedArgs(*given, **named)
    q, rows = args.q, _rows(args)
    out, lse = padded.attend(_padded(args))
    if rows is None:
        return placed_beside(out.transpose(1, 2), q), lse.contiguous()
    out, lse = rows.unpad(out, q.shape[0]), rows.unpad(lse, q.shape[0], float("-inf"))
    return placed_beside(out, q), lse.mT.contiguous()


def _rows(args: PagedArgs[torch.Tensor]) -> padded.Rows | None:
    """Return the ragged rows of the queries (see `padded.Rows`), or None for dense queries."""
    return None if args.cu_seqlens_q is None else padded.Rows(args.cu_seqlens_q, args.max_seqlen_q)


def _padded(args: PagedArgs[torch.Tensor]) -> padded.Padded:
    """Gather the pages into dense keys and values, and return dense arguments with a mask of the present keys."""
    q, rows = args.q, _rows(args)
    keys, values = (_gather(x, args.block_tables) for x in _wide_pages(args))
    present = torch.arange(keys.shape[2], device=q.device) < args.lengths[:, None]
    # Memory past a sequence's end may hold NaN, which a zero weight would not cancel.
    keys, values = (torch.where(present[:, None, :, None], x, 0) for x in (keys, values))
    queries = q.transpose(1, 2) if rows is None else rows.pad(q)
    count = torch.full_like(args.lengths, queries.shape[2]) if rows is None else rows.lengths
    lengths = args.lengths.clamp(0, keys.shape[2])
    return padded.masked(dense_args(queries, keys, values, args), count, lengths, present)


def _wide_pages(args: PagedArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages; those of float8 in q's dtype."""
    if args.k_scale is None or args.v_scale is None:
        return args.k_pages, args.v_pages
    dtype = args.q.dtype
    return widened(args.k_pages, args.k_scale, dtype), widened(args.v_pages, args.v_scale, dtype)


def gradients(grad: torch.Tensor, args: PagedArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of `reference` in q, k_pages and v_pages, summed over sequences, in the dtype of sums."""
    rows = _rows(args)
    dq, dk, dv = padded.gradients(grad.transpose(1, 2) if rows is None else rows.pad(grad), _padded(args))
    dq = dq.transpose(1, 2) if rows is None else rows.unpad(dq, args.q.shape[0])
    return dq, _scatter(dk, args.k_pages, args.block_tables), _scatter(dv, args.v_pages, args.block_tables)


def _scatter(grad: torch.Tensor, pages: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """Add `[B, Hkv, S, D]` up into zeros of the pages' shape: the adjoint of `_gather`."""
    if not pages.shape[0]:
        return grad.new_zeros(pages.shape)
    index = block_tables.clamp(0, pages.shape[0] - 1).long().reshape(-1)
    rows = grad.transpose(1, 2).reshape(index.shape[0], *pages.shape[1:])
    return grad.new_zeros(pages.shape).index_add(0, index, rows)


def _gather(pages: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """Gather pages `[pages, page, Hkv, D]` by the table into keys `[B, Hkv, S, D]`; bad entries read some page."""
    (batch, columns), (count, page, heads, width) = block_tables.shape, pages.shape
    if not count:
        return pages.new_zeros((batch, heads, 0, width))
    found = pages[block_tables.clamp(0, count - 1).long()]
    return found.reshape(batch, columns * page, heads, width).transpose(1, 2)


def _empty_results(args: PagedArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results: the first lies in memory as q does."""
    q, is_ragged = args.q, args.cu_seqlens_q is not None
    shape = (q.shape[1], q.shape[0]) if is_ragged else (q.shape[0], q.shape[2], q.shape[1])
    return empty_beside(q, args.v_pages.shape[3]), q.new_empty(shape, dtype=compute_dtype(q.dtype))


@entry_function(PagedArgs, reference, _empty_results)
def attention_paged(
    args: PagedArgs[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None, config: Any = None
) -> bool:
    """Compute attention as `reference` does. `config` overrides the choice of a tiling."""
    if not (out if lse is None else lse).numel():
        return True
    if not (args.k_pages.numel() and args.v_pages.numel() and args.block_tables.numel()):
        return False
    ragged = args.cu_seqlens_q is not None
    view = by_head if ragged else _heads_first
    dense = dense_args(view(args.q), args.k_pages.transpose(1, 2), args.v_pages.transpose(1, 2), args)
    log_sums = lse[None] if ragged and lse is not None else lse
    run = partial(forward.run, sequences=sequences_of(args), scales=_scales(args))
    return run(dense, view(out), log_sums, machine_of(args.q), config, args.num_splits)


def _scales(args: PagedArgs[torch.Tensor]) -> Scales | None:
    """Return the scales of pages of float8, one for each position and head, which may lie at one place."""
    if args.k_scale is None or args.v_scale is None:
        return None
    each = args.k_pages.shape[:3]
    return Scales(*(x.expand(each).transpose(1, 2) for x in (args.k_scale, args.v_scale)))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """Swap the position and head dimensions."""
    return x.transpose(1, 2)


def sequences_of(args: PagedArgs[torch.Tensor]) -> Sequences:
    """Describe the call's paged sequences for the attention kernel: layout, row ends, block table and lengths."""
    page, ends = args.k_pages.shape[1], args.cu_seqlens_q
    most = args.q.shape[1] if ends is None else args.max_seqlen_q
    return Sequences(
        Layout(ends is not None, page),
        most,
        args.block_tables.shape[1] * page,
        None if ends is None else ends[1:],
        None,
        args.block_tables,
        args.lengths,
    )


# Writing new keys and values into the pages.


def append_reference(args: AppendArgs[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Compute `tile.append_to_pages`: return copies of the pages, and of given scales, with the new rows."""
    k, v, k_pages, v_pages, block_tables, lengths, cu_seqlens, _, k_scale, v_scale = args
    page, columns = k_pages.shape[1], block_tables.shape[1]
    sequence, position = _positions(k, lengths, cu_seqlens)
    inside = (sequence >= 0) & (position >= 0) & (position < columns * page)
    sequence, position = sequence[inside], position[inside]
    at = block_tables[sequence, position // page].long()
    exists = (at >= 0) & (at < k_pages.shape[0])
    place = at[exists], (position % page)[exists]
    made, scales = [], []
    for new, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        rows = new.reshape(-1, *new.shape[-2:])[inside.reshape(-1)][exists]
        if scale is not None:
            rows = rows.to(compute_dtype(rows.dtype))
            if makes_scales(scale, pages):
                own = (rows.abs().amax(-1).clamp_min(LEAST) / LARGEST[E4M3]).float()
                scales.append(scale.index_put(place, own))
            else:
                own = scale.expand(pages.shape[:3])[place]
                scales.append(scale)
            rows = (rows * (1.0 / own)[..., None]).clamp(-LARGEST[E4M3], LARGEST[E4M3])
        made.append(_put(pages, place, rows.to(pages.dtype)))
    return *made, *scales


def _put(pages: torch.Tensor, place: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the pages with rows put in. Torch has no such function of float8, whose bytes are put."""
    if pages.dtype != E4M3:
        return pages.index_put(place, rows)
    return pages.view(torch.uint8).index_put(place, rows.view(torch.uint8)).view(E4M3)


def makes_scales(scale: torch.Tensor, pages: torch.Tensor) -> bool:
    """Return whether appending makes the scale of each new row, as there is one for each position and head."""
    return tuple(scale.shape) == tuple(pages.shape[:3])


def _positions(
    k: torch.Tensor, lengths: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each new key, -1 for none, and its position in the sequence."""
    if cu_seqlens is None:
        batch, new = k.shape[:2]
        sequence = torch.arange(batch, device=k.device).repeat_interleave(new)
        return sequence, (lengths.long()[:, None] - new + torch.arange(new, device=k.device)).reshape(-1)
    row = torch.arange(k.shape[0], device=k.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous().long(), row, right=True)
    inside = sequence < lengths.shape[0]
    sequence = sequence.clamp(max=max(lengths.shape[0] - 1, 0))
    position = row - cu_seqlens[1:].long()[sequence] + lengths.long()[sequence]
    return torch.where(inside, sequence, -1), position


ROWS = 8  # new positions of a block


@library_jit
def write_pages(
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    widths: tuple[int, int],
    page: int,
    ragged: bool,
    makes: tuple[bool, ...] = (),
) -> Any:
    """Build the kernel that writes the new keys and values of ROWS positions of one sequence and one head.

    `starts` has two numbers for each sequence: its first new row, and the end of its new rows. Pages of float8 have
    scales, and `makes` says of those of keys and of values whether they are made here.
    """
    heads, rows, sequences, columns, pages = T.dynamic("heads, rows, sequences, columns, pages")
    slabs = 1 if ragged else sequences  # packed sequences lie in one
    sizes = list(zip("kv", widths, strict=True))
    new_types = [strided(name, (slabs, rows, heads, width), dtype) for name, width in sizes]
    page_types = [strided(f"{name}_pages", (pages, page, heads, width), page_dtype) for name, width in sizes]
    start_types = [strided("cu_seqlens", (sequences + 1,), torch.int32, unit=False, align=4)] if ragged else []
    scale_types = [
        strided(f"{name}_scale", (pages, page, heads), torch.float32, unit=False, align=4) for name in "kv" if makes
    ]
    accum = compute_dtype(dtype)

    @T.prim_func
    def write_pages(
        *tensors: [*new_types, *page_types, *scale_types, *start_types],
        block_tables: strided("block_tables", (sequences, columns), torch.int32, unit=False, align=4),
        lengths: strided("lengths", (sequences,), torch.int32, unit=False, align=4),
        most: T.int32,
    ):
        with T.Kernel(T.ceildiv(most, ROWS), heads, sequences, threads=128) as (bx, head, sequence):
            if ragged:
                starts = tensors[-1]
                begin = T.clamp(starts[sequence], 0, rows)
                count = T.clamp(starts[sequence + 1], begin, rows) - begin
            else:
                begin, count = 0, rows
            slab = 0 if ragged else sequence
            first = lengths[sequence] - count
            for n, (new, cache, width) in enumerate(zip(tensors[:2], tensors[2:4], widths, strict=True)):
                if makes:
                    own = T.alloc_fragment((ROWS,), accum)
                    if makes[n]:
                        values = T.alloc_fragment((ROWS, width), accum)
                        for i, c in T.Parallel(ROWS, width):
                            row = T.min(begin + bx * ROWS + i, rows - 1)
                            values[i, c] = T.cast(new[slab, row, head, c], accum)
                        T.fill(own, LEAST)
                        T.reduce_absmax(values, own, dim=1, clear=False, nan_propagate=True)
                    for i in T.Parallel(ROWS):
                        position = first + bx * ROWS + i
                        if bx * ROWS + i < count and position >= 0 and position < columns * page:
                            number = block_tables[sequence, position // page]
                            if number >= 0 and number < pages:
                                if makes[n]:
                                    own[i] = T.cast(own[i] / LARGEST[E4M3], T.float32)
                                    tensors[4 + n][number, position % page, head] = T.cast(own[i], T.float32)
                                else:
                                    own[i] = T.cast(tensors[4 + n][number, position % page, head], accum)
                for i, c in T.Parallel(ROWS, width):
                    position = first + bx * ROWS + i
                    if bx * ROWS + i < count and position >= 0 and position < columns * page:
                        number = block_tables[sequence, position // page]
                        if number >= 0 and number < pages:
                            row = begin + bx * ROWS + i
                            if makes:
                                value = T.cast(new[slab, row, head, c], accum) * (1.0 / own[i])
                                cache[number, position % page, head, c] = rounded(value, E4M3)
                            else:
                                cache[number, position % page, head, c] = new[slab, row, head, c]

    return write_pages


def append_to_pages(args: AppendArgs[torch.Tensor]) -> None:
    """Write new keys and values into pages, as `append_reference` says. A sequence has `max_seqlen` new ones at most,
    which is not read without cu_seqlens.
    """
    k, v, k_pages, v_pages, block_tables, lengths, cu_seqlens, max_seqlen, k_scale, v_scale = args
    able = has_kernels(k) and is_unit(k_pages) and is_unit(v_pages) and k.shape[-1] and v.shape[-1]
    ragged = cu_seqlens is not None
    most = max_seqlen if ragged else k.shape[1]
    if not (k.numel() or v.numel()) or not block_tables.numel() or not k_pages.shape[0] or not most:
        return
    scales = [x for x in (k_scale, v_scale) if x is not None]
    if not able:
        found = append_reference(args)
        for old, made in zip((k_pages, v_pages, *scales), found, strict=True):
            if made is not old:
                old.copy_(made)
        return
    new = [dense_last(x[None] if ragged else x) for x in (k, v)]
    widths = (k.shape[-1], v.shape[-1])
    makes = tuple(makes_scales(*x) for x in zip(scales, (k_pages, v_pages), strict=False))
    each = [x.expand(k_pages.shape[:3]) for x in scales]
    kernel = machine_of(k).kernel(write_pages)(k.dtype, k_pages.dtype, widths, k_pages.shape[1], ragged, makes)
    starts = [cu_seqlens] if cu_seqlens is not None else []
    kernel(*new, k_pages, v_pages, *each, *starts, block_tables, lengths, most)
