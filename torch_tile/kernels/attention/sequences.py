# SPDX-License-Identifier: Apache-2.0
"""The memory layout of each sequence's rows and keys, which the kernels of attention are compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import strided
from torch_tile.kernels.row_groups import END, FIELDS, FIRST, GROUP, bounds_of, most_tiles, plan


@dataclass(frozen=True)
class Span:
    """The part of a sequence that one block computes: its first row, and the sequence's number of queries and keys.

    The block begins at row `first` of the `length` rows of its sequence. In a tensor it begins at row `row`, under
    index `slab` of its first dimension. The sequence has so many `queries` from `first_query` on, and `keys` from
    `first_key` on. `sequence` is its number, and so is `group`, which for rows behind the last sequence is one more.
    """

    group: Any
    sequence: Any
    slab: Any
    first: Any
    row: Any
    length: Any
    queries: Any
    keys: Any
    q_offset: Any
    first_query: Any = 0
    first_key: Any = 0


@dataclass(frozen=True)
class Layout:
    """How sequences lie in memory: dense or ragged, keys contiguous or in pages of `page` positions (0: none)."""

    ragged: bool = False
    page: int = 0

    @property
    def fixed(self) -> bool:
        """Return whether all sequences have the lengths that the tensors' shapes say."""
        return not (self.ragged or self.page)

    def types(self, sequences: Any) -> list[Any]:
        """Return the parameter types of the kernel's int32 tensors of row ends, tile plans, tables and lengths."""
        found = []
        if self.ragged:
            found = [_ints("q_ends", sequences), T.Tensor((T.dynamic("tiles"), FIELDS), torch.int32)]
        if self.page:
            table = strided("block_tables", (sequences, T.dynamic("columns")), torch.int32, unit=False, align=4)
            return [*found, table, _ints("lengths", sequences)]
        return [*found, _ints("k_ends", sequences)] if self.ragged else []

    def fits(self, block_kv: int) -> bool:
        """Return whether a tile of `block_kv` keys is whole pages, or a part of one page."""
        return not self.page or self.page % block_kv == 0 or block_kv % self.page == 0


def _ints(name: str, count: Any) -> Any:
    """Return the type of an int32 kernel parameter with `count` elements."""
    return strided(name, (count,), torch.int32, unit=False, align=4)


@dataclass(frozen=True)
class Given:
    """The int32 tensors that describe ragged or paged sequences inside a kernel. `ends` are those of queries and of
    keys, of which `plan` cuts one.
    """

    layout: Layout
    tensors: Sequence[Any]
    held: Any = None  # numbers of the pages of all of a block's tiles, in order

    @property
    def q_ends(self) -> Any:
        """Return the ends of the queries of each ragged sequence."""
        return self.tensors[0]

    @property
    def tiles(self) -> Any:
        """Return the plan of tiles of ragged sequences."""
        return self.tensors[1]

    @property
    def k_ends(self) -> Any:
        """Return the ends of the keys of each ragged sequence."""
        return self.tensors[2]

    @property
    def table(self) -> Any:
        """Return the table of pages of each sequence."""
        return self.tensors[-2]

    @property
    def lengths(self) -> Any:
        """Return the number of keys of each sequence in pages."""
        return self.tensors[-1]

    @T.macro
    def paged_keys(self, sequence: Any) -> Any:
        """Return the number of keys of a sequence in pages, no more than its pages hold."""
        return T.clamp(self.lengths[sequence], 0, self.table.shape[1] * self.layout.page)

    @T.macro
    def ragged_span(self, tile: Any, total_q: Any, total_k: Any, of_keys: bool) -> Span:
        """Return the span of a planned tile, of keys or of queries. Rows behind the last sequence see nothing."""
        group, count = self.tiles[tile, GROUP], self.q_ends.shape[0]
        sequence = T.clamp(group, 0, count - 1)
        first_query, q_end = bounds_of(group, self.q_ends, total_q)
        row = self.tiles[tile, FIRST]
        if self.layout.page:
            first_key = 0
            keys = T.if_then_else(group < count, self.paged_keys(sequence), 0)
        else:
            first_key, k_end = bounds_of(group, self.k_ends, total_k)
            keys = k_end - first_key
        queries = q_end - first_query
        q_offset = keys - queries
        first = row - (first_key if of_keys else first_query)
        length = keys if of_keys else queries
        # Behind the last sequence each kind of rows is without the other one.
        none = group >= count
        seers = T.if_then_else(none, 0, queries) if of_keys else queries
        seen = keys if of_keys else T.if_then_else(none, 0, keys)
        return Span(group, sequence, 0, first, row, length, seers, seen, q_offset, first_query, first_key)


def dense_span(first: Any, sequence: Any, length: Any, queries: Any, keys: Any, q_offset: Any) -> Span:
    """Return the span of the block whose first row is `first` in a dense sequence."""
    return Span(sequence, sequence, sequence, first, first, length, queries, keys, q_offset)


@T.macro
def load_keys(given: Given, x: Any, tile: Any, span: Span, head: Any, step: Any, iteration: Any = None) -> None:
    """Load keys, values or their scales of a step into a tile. Scales have no columns.

    Where a block holds page numbers, they are those of its `iteration`.
    """
    keys, page = tile.shape[0], given.layout.page
    columns = (0,) * (len(tile.shape) - 1)
    if not page:
        T.copy(x[(span.slab, head, after(span.first_key, step * keys), *columns)], tile)
    elif page % keys == 0:
        each = page // keys
        number = page_of(given, x, span.sequence, step // each, iteration)
        T.copy(x[(number, head, step % each * keys, *columns)], tile)
    elif keys % page == 0:
        each = keys // page
        numbers: list[Any] = []
        for n in tuple(range(each)):  # names, so that the table is read once, and before the first copy
            place = None if iteration is None else iteration * each + n
            number = page_of(given, x, span.sequence, step * each + n, place)
            numbers.append(number)
        for n, number in enumerate(numbers):  # each page a copy of its own, no loop
            rows = (slice(n * page, (n + 1) * page), *(slice(None) for _ in columns))
            T.copy(x[(number, head, 0, *columns)], tile[rows])
    else:
        for j, *c in T.Parallel(*tile.shape):
            position = step * keys + j
            tile[(j, *c)] = x[(page_of(given, x, span.sequence, position // page), head, position % page, *c)]


def after(first: Any, number: Any) -> Any:
    """Return the row index `first + number`, without an addition where `first` is the constant 0."""
    return number if isinstance(first, int) and first == 0 else first + number


@T.macro
def held_pages(given: Given, x: Any, sequence: Any, keys: int, count: int, steps: tuple[Any, Any]) -> Given:
    """Load the page numbers of a block's tiles of `keys` positions at once, `count` in all.

    `steps` are its first tile and their distance. Threads then wait for memory once, beside the sequence's length.
    """
    first, stride = steps
    each, of_page = max(keys // given.layout.page, 1), max(given.layout.page // keys, 1)
    held = T.alloc_shared((count,), T.int32)
    for n in T.Parallel(count):
        held[n] = page_of(given, x, sequence, (first + n // each * stride) // of_page * each + n % each)
    return replace(given, held=held)


def page_of(given: Given, x: Any, sequence: Any, column: Any, place: Any = None) -> Any:
    """Return the page number in a column of a sequence's table, clamped to pages of `x` that exist.

    It is the number at `place` of those that the block holds, if it holds any.
    """
    if given.held is not None and place is not None:
        return given.held[place]
    inside = T.min(column, given.table.shape[1] - 1)
    return T.clamp(given.table[sequence, inside], 0, x.shape[0] - 1)


@T.macro
def clear_past(tile: Any, first: Any, end: Any, may: Any = True) -> None:
    """Set the rows of a tile behind the end of the sequence to zero. Only iterations that `may` have such rows."""
    if T.logical_and(may, first + tile.shape[0] > end):
        for i, *c in T.Parallel(*tile.shape):
            if first + i >= end:
                tile[(i, *c)] = 0


@T.macro
def store_own(acc: Any, weight: Any, out: Any, place: tuple[Any, ...], span: Span, staged: bool) -> None:
    """Store weighted accumulator rows to `out`, except for rows behind the end of the sequence. `staged` ones pass
    through shared memory, for runs of 16 bytes.
    """
    rows, columns = acc.shape
    if staged:
        result = T.alloc_fragment(acc.shape, out.dtype)
        buffer = T.alloc_shared(acc.shape, out.dtype)
        for i, c in T.Parallel(rows, columns):
            result[i, c] = T.cast(acc[i, c] * weight[i], out.dtype)
        T.copy(result, buffer)
        for i, c in T.Parallel(rows, columns):
            if span.first + i < span.length:
                out[(*place, span.row + i, c)] = buffer[i, c]
    else:
        for i, c in T.Parallel(rows, columns):
            if span.first + i < span.length:
                out[(*place, span.row + i, c)] = acc[i, c] * weight[i]


@dataclass(frozen=True, eq=False)
class Sequences:
    """The tensors that describe ragged or paged sequences on the host, before a launch.

    `q_ends` and `k_ends` int32 `[B]`, where queries and keys of each end; `block_tables` int32 `[B, n]` and `lengths`
    int32 `[B]`. `most_queries` and `most_keys` of one sequence, on which only speed depends.
    """

    layout: Layout
    most_queries: Any
    most_keys: Any
    q_ends: torch.Tensor | None = None
    k_ends: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    @property
    def count(self) -> Any:
        """Return the number of sequences."""
        some = self.q_ends if self.lengths is None else self.lengths
        return 0 if some is None else some.shape[0]

    def tensors(self, rows: Any, height: int) -> list[torch.Tensor]:
        """Return the kernel's int32 arguments, with an empty tile plan for `rows` rows in tiles of `height`."""
        found = []
        if self.q_ends is not None:
            plan_of = self.q_ends.new_empty((most_tiles(rows, self.count, height), FIELDS))
            found = [self.q_ends, plan_of]
        others = (self.k_ends, self.block_tables, self.lengths)
        return [*found, *(x for x in others if x is not None)]


DENSE = Layout()
__all__ = [
    "DENSE",
    "END",
    "Given",
    "Layout",
    "Sequences",
    "Span",
    "clear_past",
    "dense_span",
    "held_pages",
    "load_keys",
    "page_of",
    "plan",
]
