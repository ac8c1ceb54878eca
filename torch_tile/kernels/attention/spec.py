# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of an attention kernel: its tiling and its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.block_lists import BlockLists, Listed
from torch_tile.kernels.attention.operands import Operand, operands_of
from torch_tile.kernels.attention.score_mod import may_have_finite_min_masks, slopes_of, split_gain
from torch_tile.kernels.attention.sequences import DENSE, Layout
from torch_tile.kernels.common import Machine, round_up, strided, vector_of
from torch_tile.kernels.epilogue.autodiff import Sloped
from torch_tile.kernels.epilogue.program import Epilogue, parse
from torch_tile.kernels.footprint import Part, Tile

MOST_SPLITS = 1 << 23  # whose keys are counted in 32 bits; 64 take more instructions


@dataclass(frozen=True)
class Config:
    """The tiling of attention. A block holds `block_q` rows (queries of a group of heads) and steps by `block_kv` keys.

    `split`: blocks take splits of the keys. `packed`: a block's rows are of all heads that share a key head, not of one
    of them. For GPUs: `heavy_first` starts with the last queries, which see most keys under a causal mask. With `side`
    of at least 2, only that many heads run side by side. Their keys and values then stay in the second-level cache.
    Where `side` does not divide the heads of all sequences, some blocks have none. `resident` keeps the queries in
    registers. `shared_probs` hands the probabilities to other warps, as tiles of few rows need. `partial_sums` is the
    number of parts in which the sum of a row is kept; 8 leaves each thread of an accumulator with its own. `staged`
    sends the result through shared memory. Unless rows are packed, `tiled` does so with masks and other operands that
    change with the keys. `ping_pong` lets warpgroups start their products in turns. `blocks` is the number of blocks
    that run on an SM at once. `through_queries` sends the result through the shared memory of the queries, which are
    read by then. `persistent` is the number of blocks that take tile after tile, or 0: one block for each tile. With
    `paired` each takes the longest tile that is left of a head, then the shortest. Its keys come in rising order.
    `rounds_by_length` counts the last rounds of pairs, one of them not whole, whose tiles go by falling length instead.
    Shares are even then; by pairs alone some blocks have none in the last round. The first round is of pairs, so
    that a block finds its first tile by few divisions.
    With `queries_ahead` the queries of a persistent block's next tile come while it works on one.
    With `early` that tile's first product starts beside the last product of a tile.
    With `in_order` persistent blocks take tiles head by head, as launches do. Few heads are then read at a time.
    With `own_keys` a warpgroup leaves out the last key tiles of its block that none of its rows sees. It hides keys
    only in tiles that its own rows cut.
    With `halved` the keys come in rising order. A warpgroup leaves out the second half of a tile's last values if it
    sees none of these.
    With `ordered` blocks of keys add to gradients of queries in one order. With `alone` one block has all keys.
    `shared_wave` is the number of multiprocessors if `members` blocks share each block of keys of a last wave, or 0.
    `narrow` multiplies keys and values of float8 without a tile of 16 bits: products widen them in registers, and
    scales go to scores and weights. With `one_tile` a block has all rows of its heads: no index is divided by splits.
    `entries` are those of its table of pages that a split loads at once, beside its sequence's length, or 0.
    """

    block_q: int = 64
    block_kv: int = 64
    threads: int = 128
    stages: int = 2
    split: bool = False
    packed: bool = True
    heavy_first: bool = False
    side: int = 1
    resident: bool = False
    shared_probs: bool = False
    partial_sums: int = 1
    staged: bool = False
    tiled: bool = False
    ping_pong: bool = False
    blocks: int = 1
    through_queries: bool = False
    persistent: int = 0
    narrow: bool = False
    paired: bool = False
    rounds_by_length: int = 0
    own_keys: bool = False
    in_order: bool = False
    queries_ahead: bool = False
    early: bool = False
    halved: bool = False
    ordered: bool = False
    alone: bool = False
    shared_wave: int = 0
    members: int = 1
    one_tile: bool = False
    entries: int = 0

    def grid(self, blocks: Any, kv_heads: Any, batch: Any, splits: Any) -> tuple[Any, Any, Any]:
        """Return the grid of the launch. Its fastest dimension holds the blocks that run side by side."""
        if self.persistent:
            return self.persistent, 1, 1
        if self.split:
            return splits if self.one_tile else blocks * splits, kv_heads, batch
        if self.side > 1:
            return self.side, blocks, T.ceildiv(kv_heads * batch, self.side)
        return (kv_heads, batch, blocks) if self.heavy_first else (blocks, kv_heads, batch)

    def loop(self, waves: Any) -> Any:
        """Return the loop of a persistent block over its tiles."""
        return T.Pipelined(waves, num_stages=2) if self.queries_ahead else T.serial(waves)

    def waves(self, block: Any, tiles: Any) -> Any:
        """Count the tiles of a persistent block, of `tiles` in all."""
        if self.paired and not self.rounds_by_length:
            rest, of_all = T.max(tiles - 2 * block, 0), 2 * self.persistent
            return rest // of_all * 2 + T.min(rest % of_all, 2)
        whole = tiles // self.persistent
        count = whole + T.if_then_else(self._rank(whole, block) < tiles % self.persistent, 1, 0)
        if not self.paired:
            return count
        return T.if_then_else(tiles < 2 * self.persistent, T.min(T.max(tiles - 2 * block, 0), 2), count)

    def tile(self, wave: Any, block: Any, blocks: Any, heads: Any, tiles: Any) -> tuple[Any, Any]:
        """Return the rows and the head that a persistent block takes in its wave, of `tiles` in all.

        The longest come first, if not `in_order`.
        """
        if self.paired and self.rounds_by_length:
            return self._pairs_then_by_length(wave, block, blocks, heads, tiles)  # type: ignore[no-any-return]
        if self.paired:
            tile = (wave // 2 * self.persistent + block) * 2 + wave % 2
            rank = tile % blocks
            return T.if_then_else(rank % 2 == 1, rank // 2, blocks - 1 - rank // 2), tile // blocks
        tile = wave * self.persistent + self._rank(wave, block)
        return (tile % blocks, tile // blocks) if self.in_order else (blocks - 1 - tile // heads, tile % heads)

    @T.macro
    def _pairs_then_by_length(self, wave: Any, block: Any, blocks: Any, heads: Any, tiles: Any) -> tuple[Any, Any]:
        """Return the tile of a wave as `tile` does: pairs, then what is left of them by falling length."""
        place = wave * self.persistent + self._rank(wave, block)
        waves = T.max(tiles // (2 * self.persistent) - (self.rounds_by_length - 1), 1) * 2  # of pairs
        pair = (wave // 2 * self.persistent + block) * 2 + wave % 2
        rank = pair % blocks  # of a tile among those of its head: the longest, the shortest, the second longest, ..
        in_head = T.if_then_else(rank % 2 == 1, blocks - 1 - rank // 2, rank // 2)
        # Of the tiles from `begin` on, `left` are of a head that lacks its `long` longest ones. The others are whole.
        begin = waves * self.persistent
        left = (blocks - begin % blocks) % blocks
        long, whole = (blocks - left + 1) // 2, heads - T.ceildiv(begin, blocks)
        place = T.max(place - begin, 0)
        above = place < long * whole
        beside = T.logical_and(place >= long * whole, place < long * whole + left * (whole + 1))
        width = T.max(T.if_then_else(beside, whole + 1, whole), 1)
        place = T.max(place + T.if_then_else(beside, long, T.if_then_else(above, 0, -left)), 0)
        in_pairs = wave < waves
        longer = T.if_then_else(in_pairs, in_head, place // width)  # tiles of the head that are longer
        return blocks - 1 - longer, T.if_then_else(in_pairs, pair // blocks, heads - 1 - place % width)

    def _rank(self, wave: Any, block: Any) -> Any:
        """Return the place of a block in a wave: every other one runs backwards, so that the shares are even.

        Tiles `in_order` are equally long.
        """
        return block if self.in_order else T.if_then_else(wave % 2 == 1, self.persistent - 1 - block, block)

    def place(self, x: Any, y: Any, z: Any, blocks: Any, kv_heads: Any, splits: Any) -> tuple[Any, Any, Any, Any]:
        """Return the block of rows, the key head, the sequence and the split of a block of the launch."""
        if self.split:
            return (0, y, z, x) if self.one_tile else (x // splits, y, z, x % splits)
        if self.side > 1:
            head = z * self.side + x
            return blocks - 1 - y if self.heavy_first else y, head % kv_heads, head // kv_heads, 0
        return (blocks - 1 - z, x, y, 0) if self.heavy_first else (x, y, z, 0)


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of an attention kernel, besides its `Config`.

    Tiles are `tile_d` and `tile_dv` wide; heads of exactly that size have `exact`, others end in zeros. `mask` is what
    is known of the mask, or None. `grouped`: several heads share a key head. `folded`: a positive factor of the scores
    is applied inside the exponent, as no mask adds to them. Rows of q, k, v and the result start at multiples of
    `vector` elements. `shifted`: query 0 may stand at another key than key 0; else a causal mask without a window cuts
    fewer tiles. `score` is the text that changes scores (score_mod.py), and `aux` its operands. `keep` names those
    of "mask" and "x0".. whose gradients are stored, one for each score. `lse`: the log-sum-exp of each row is stored.
    `fuses`: sums in float32, on a machine that makes a product and a sum in one instruction. `layout`: how sequences
    lie in memory. `lists`: of the blocks that a block's rows see, instead of a range. `scaled`: keys and values are
    float8 with scales (scaled_keys.py).
    """

    dtype: torch.dtype
    tile_d: int
    tile_dv: int
    exact: bool
    causal: bool
    windowed: bool
    mask: Operand | None
    grouped: bool
    folded: bool
    vector: int = 1
    shifted: bool = True
    score: str = ""
    aux: tuple[Operand, ...] = ()
    keep: tuple[str, ...] = ()
    lse: bool = True
    fuses: bool = True
    layout: Layout = DENSE
    lists: BlockLists | None = None
    scaled: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return the operands of scores: the mask, if there is one, and the operands of `score`."""
        return self.aux if self.mask is None else (self.mask, *self.aux)

    def operand_tiles(self, config: Config) -> list[Tile]:
        """Return the tiles of operands in shared memory."""
        found = []
        for x in self.operands if config.tiled else ():
            if x.tiled:
                rows, columns = (1, *x.tile(config.block_q, config.block_kv))[-2:]
                found.append(Tile(rows, columns, 8 * x.stored.itemsize, config.stages, (Part.LOOP,)))
        return found

    def operand_types(self, batch: Any, heads: tuple[Any, Any], queries: Any, keys: Any) -> list[Any]:
        """Return the types of the operands. `heads` are key heads and heads of a group."""
        sizes = {"b": (batch,), "h": heads, "q": (queries,), "k": (keys,)}
        return [x.type(f"x{n}", sizes) for n, x in enumerate(self.operands)]

    @property
    def program(self) -> Epilogue:
        """Return the program that turns a scaled product into a score, as a multiple of `unit`."""
        return split_gain(self.score)[0] if self.folded else parse(self.score)

    @property
    def sloped(self) -> Sloped:
        """Return the program of scores with their derivatives in the product and the kept operands."""
        return slopes_of(self.score, ("acc0", *(name for name in self.keep if name != "mask")))

    def slope(self, name: str) -> str | float:
        """Return the derivative of a score in the product ("acc0") or an operand: a value of `sloped`, or a number."""
        return 1.0 if name == "mask" else self.sloped.slopes.get(name, 0.0)

    @property
    def slopes(self) -> list[str | float]:
        """Return the distinct slopes, the product's first."""
        return list(dict.fromkeys(map(self.slope, ("acc0", *self.keep))))

    @property
    def masks_padding(self) -> bool:
        """Return whether the backward masks rows past the last query: their scores or slopes may be infinite, or they
        are rows of the next sequence.

        Such rows have a probability of 0, and 0 times infinity is not a number.
        """
        values = (split_gain(self.score)[0].result, *self.slopes) if self.score else ()
        return not self.layout.fixed or any(map(self.sloped.may_be_infinite, values))

    @property
    def finite_min_masks(self) -> bool:
        """Return whether scores may hold the lowest finite numbers in place of -inf."""
        return (self.mask is not None and self.mask.dtype.is_floating_point) or may_have_finite_min_masks(
            self.score, self.aux
        )

    @property
    def row_statistics(self) -> int:
        """Count the statistics of each query that the kernel of dq leaves for that of dk and dv."""
        return 3 if self.finite_min_masks else 2

    @property
    def subtracts(self) -> bool:
        """Return whether the maxima are subtracted from all scores before the scores are scaled."""
        return self.finite_min_masks or not self.fuses

    def unit(self, scale: Any) -> Any:
        """Return the unit in which scores are kept."""
        if not self.folded:
            return 1.0
        return split_gain(self.score)[1] if self.score else scale

    def out_type(self, shape: Sequence[Any]) -> Any:
        """Return the type of the result, dense in some order. Each stride is a multiple of the last dimension."""
        return strided("out", shape, self.dtype, multiple=self.tile_dv if self.exact else self.vector)

    def key_blocks(
        self,
        config: Config,
        extremes: tuple[Any, Any],
        q_offset: Any,
        window: Any,
        kv_len: Any,
        splits: Any,
        split: Any,
        listed: Any = None,
    ) -> Any:
        """Return the range of key blocks that a block's queries may see, within one split if splits take no turns.

        `extremes` are the first and the last query of a block. With lists the range is of the `listed` tiles.
        """
        first_query, last_query = extremes
        q_offset = q_offset if self.shifted else 0
        first: Any = 0
        end = T.ceildiv(kv_len, config.block_kv) if listed is None else listed
        if self.causal and listed is None:
            end = T.min(end, (last_query + q_offset) // config.block_kv + 1)
        if self.windowed and listed is None:
            first = T.max(0, (first_query + q_offset - window + 1) // config.block_kv)
        if self.interleaves(config):
            end = T.max(end, first)
        elif config.split:
            each = (T.max(end - first, 0) - 1) // splits + 1  # no sum passes 32 bits: 64 divide slowly
            first = first + split * each
            end = T.min(first + each, end)
        return first, end

    def interleaves(self, config: Config) -> bool:
        """Return whether splits take key blocks in turns: blocks that run together then read what lies together.

        Entries of a table of pages are then known before the sequence's length. Splits that do not load them at once
        take runs of blocks, whose entries lie in a row.
        """
        return config.split and (self.layout.fixed or config.entries > 0)

    def iterations(self, config: Config, blocks: Any, splits: Any, split: Any) -> Any:
        """Count the iterations over key blocks, of which `key_blocks` returned `blocks`."""
        if not self.interleaves(config):
            return blocks
        return (T.max(blocks - split, 0) + (splits - 1)) // splits

    def block_number(self, config: Config, iteration: Any, blocks: Any, splits: Any, split: Any) -> Any:
        """Return the number of an iteration's key block among the `blocks` that `key_blocks` returned."""
        return split + iteration * splits if self.interleaves(config) else iteration

    def backwards(self, config: Config) -> bool:
        """Return whether iterations run from the last key block to the first. The last blocks end inside a tile or are
        causally masked, so later iterations need no mask.

        Of the heads of a group that are packed, it may hide any number of tiles. Lists name blocks in any order. Where
        the last block lies is not known before a sequence's length.
        """
        if config.paired or self.windowed or self.lists is not None or config.entries:
            return False
        return not (self.causal and config.packed and self.grouped)

    def needs_mask(
        self,
        config: Config,
        iteration: Any,
        step: Any,
        extremes: tuple[Any, Any],
        q_offset: Any,
        window: Any,
        kv_len: Any,
    ) -> Any:
        """Return whether a query between the `extremes` of a block may not see a key of an iteration's step."""
        first_query, last_query = extremes
        q_offset = q_offset if self.shifted else 0
        last = step * config.block_kv + config.block_kv - 1
        needs_mask = last >= kv_len
        if self.backwards(config):
            needs_mask = T.logical_and(iteration == 0, needs_mask)
        if self.causal:
            needs_mask = T.logical_or(needs_mask, last > first_query + q_offset)
        if self.windowed:
            needs_mask = T.logical_or(needs_mask, step * config.block_kv <= last_query + q_offset - window)
        return needs_mask

    def keys_seen(self, query: Any, first: Any, block_kv: int, q_offset: Any, window: Any, kv_len: Any) -> Any:
        """Return the first key and the end of the keys that the causal and window rules let a query see. The keys are
        those of a block of `block_kv` that begins at `first`. Both count from there.
        """
        q_offset = q_offset if self.shifted else 0
        end = T.min(kv_len, query + q_offset + 1) if self.causal else kv_len
        end = T.max(T.min(end - first, block_kv), 0)
        return T.max(T.min(query + q_offset - window - first, block_kv), -1) + 1 if self.windowed else 0, end

    def masked(self, score: Any, *mask: Any) -> Any:
        """Apply the mask's element to a score, if there is a mask. A hidden score becomes -inf."""
        if self.mask is None:
            return score
        if self.mask.dtype == torch.bool:
            return T.if_then_else(mask[0] != 0, score, -T.infinity(score.dtype))
        return score + T.cast(mask[0], score.dtype)


def spec_of(
    args: AttentionArgs[torch.Tensor],
    by_vectors: Sequence[torch.Tensor],
    machine: Machine,
    layout: Layout,
    lists: Listed | None,
    **own: Any,
) -> tuple[Spec, list[torch.Tensor]]:
    """Return what the kernels of a call are compiled for, one's `own` fields too, and its operands of scores."""
    q, k, v, mask = args[:4]
    widths = k.shape[3], v.shape[3]
    tiles = round_up(widths[0], 16), round_up(widths[1], 16)
    given = [x for x in (mask, *(args.aux or ())) if x is not None]
    specs, operands = operands_of(given, k.shape[1], machine.is_gpu)
    spec = Spec(
        q.dtype, *tiles, tiles == widths, args.causal, args.window > 0, None if mask is None else specs[0],
        q.shape[1] // k.shape[1] > 1, vector=vector_of(by_vectors, widths) if machine.is_gpu else 1,
        shifted=not layout.fixed or is_shifted(args.causal, args.window, args.q_offset), score=args.score,
        aux=specs[mask is not None :], layout=layout, lists=None if lists is None else lists.spec, **own,
    )  # fmt: skip
    return spec, operands


def is_shifted(causal: bool, window: int, q_offset: int | torch.SymInt) -> bool:
    """Return whether kernels are compiled for queries at any offset, as one that is known at run time only."""
    return window > 0 or (causal and not (isinstance(q_offset, int) and q_offset == 0))
