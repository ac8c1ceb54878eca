# SPDX-License-Identifier: Apache-2.0
"""What an attention kernel is compiled for, and how attention is cut into blocks on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import KEPT_CHOICES, Machine, power_of_two, strided, typical
from torch_tile.kernels.epilogue import Epilogue, parse
from torch_tile.kernels.score import Aux, split_gain
from torch_tile.kernels.tuned import rows_class, tuned


@dataclass(frozen=True)
class Config:
    """How attention is cut: a block holds `block_q` rows (queries of a group of heads) and steps by `block_kv` keys.

    `split`: blocks take shares of the keys. `packed`: a block's rows are of all heads that share a key head, not of one
    of them. For GPUs: `heavy_first` starts with the last queries, which see most keys under a causal mask; with `side`
    of at least 2 only so many heads run side by side, so that their keys and values stay in the second-level cache
    (where it does not divide the heads of all sequences, some blocks have none); `resident` keeps the queries in
    registers; `shared_weights` hands the probabilities to other warps, as tiles of few rows need; `shares` is in how
    many parts the sum of a row is kept, 8 being what leaves each thread of an accumulator with its own; `staged` sends
    the result through shared memory; `ping_pong` lets warpgroups start their products in turns.
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
    shared_weights: bool = False
    shares: int = 1
    staged: bool = False
    ping_pong: bool = False

    def grid(self, blocks: Any, kv_heads: Any, batch: Any, splits: Any) -> tuple[Any, Any, Any]:
        """The launch: blocks of rows, key heads and sequences, the ones that run side by side first."""
        if self.split:
            return blocks * splits, kv_heads, batch
        if self.side > 1:
            return self.side, blocks, T.ceildiv(kv_heads * batch, self.side)
        return (kv_heads, batch, blocks) if self.heavy_first else (blocks, kv_heads, batch)

    def place(self, x: Any, y: Any, z: Any, blocks: Any, kv_heads: Any, splits: Any) -> tuple[Any, Any, Any, Any]:
        """The block of rows, the key head, the sequence and the share of a block of the launch."""
        if self.split:
            return x // splits, y, z, x % splits
        if self.side > 1:
            head = z * self.side + x
            return blocks - 1 - y if self.heavy_first else y, head % kv_heads, head // kv_heads, 0
        return (blocks - 1 - z, x, y, 0) if self.heavy_first else (x, y, z, 0)


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its `Config`.

    Tiles are `tile_d` and `tile_dv` wide; heads of exactly that size have `exact`, others end in zeros. `mask` is the
    mask's dtype, or None, and `mask_unit` says whether its last dimension is dense. `grouped`: several heads share a
    key head. `folded`: no mask, so that only blocks at an edge are masked, and a positive factor of the scores is
    applied inside the exponent. Rows of q, k, v and the result start at multiples of `vector` elements. `shifted`:
    query 0 may stand at another key than key 0; else a causal mask without a window cuts fewer tiles. `score` is
    the text that changes scores (score.py), and `aux` its operands.
    """

    dtype: torch.dtype
    tile_d: int
    tile_dv: int
    exact: bool
    causal: bool
    windowed: bool
    mask: torch.dtype | None
    mask_unit: bool
    grouped: bool
    folded: bool
    vector: int = 1
    shifted: bool = True
    score: str = ""
    aux: tuple[Aux, ...] = ()

    def operand_types(self, batch: Any, heads: tuple[Any, Any], queries: Any, keys: Any) -> list[Any]:
        """The types of the mask, if there is one (bytes for bool, as compilers vectorise their comparison with 0), and
        of what `score` reads; `heads` are key heads and heads of a group.
        """
        sizes = {"b": (batch,), "h": heads, "q": (queries,), "k": (keys,)}
        given = [x.type(f"x{n}", sizes) for n, x in enumerate(self.aux)]
        if self.mask is None:
            return given
        kind = torch.uint8 if self.mask == torch.bool else self.mask
        return [strided("mask", (batch, *heads, queries, keys), kind, self.mask_unit), *given]

    @property
    def program(self) -> Epilogue:
        """What makes of a scaled product a multiple of `unit`."""
        return split_gain(self.score)[0] if self.folded else parse(self.score)

    def unit(self, scale: Any) -> Any:
        """What scores are kept in multiples of."""
        if not self.folded:
            return 1.0
        return split_gain(self.score)[1] if self.score else scale

    def out_type(self, shape: Sequence[Any]) -> Any:
        """The type of the result, dense in some order: each stride but the last is a multiple of the last dimension."""
        return strided("out", shape, self.dtype, multiple=self.tile_dv if self.exact else self.vector)

    def key_blocks(
        self, config: Config, extremes: tuple[Any, Any], q_offset: Any, window: Any, kv_len: Any, splits: Any,
        share: Any,
    ) -> Any:  # fmt: skip
        """The first block of keys that a query may see, and the end of them; of one share if split.

        `extremes` are the first and the last query of a block.
        """
        first_query, last_query = extremes
        q_offset = q_offset if self.shifted else 0
        first: Any = 0
        end = T.ceildiv(kv_len, config.block_kv)
        if self.causal:
            end = T.min(end, (last_query + q_offset) // config.block_kv + 1)
        if self.windowed:
            first = T.max(0, (first_query + q_offset - window + 1) // config.block_kv)
        if config.split:
            each = T.ceildiv(T.max(end - first, 0), splits)
            first = first + share * each
            end = T.min(first + each, end)
        return first, end

    def backwards(self, config: Config) -> bool:
        """Whether the last keys come first, which end inside a tile and which a causal mask hides: no later turn asks.

        Of the heads of a group that are packed, it may hide any number of tiles.
        """
        return not (self.windowed or (self.causal and config.packed and self.grouped))

    def cut(
        self, config: Config, turn: Any, step: Any, extremes: tuple[Any, Any], q_offset: Any, window: Any, kv_len: Any
    ) -> Any:
        """Whether a query of a block, which are those of `extremes` and between, may not see a key of a turn's step."""
        first_query, last_query = extremes
        q_offset = q_offset if self.shifted else 0
        last = step * config.block_kv + config.block_kv - 1
        cut = last >= kv_len
        if self.backwards(config):
            cut = T.logical_and(turn == 0, cut)
        if self.causal:
            cut = T.logical_or(cut, last > first_query + q_offset)
        if self.windowed:
            cut = T.logical_or(cut, step * config.block_kv <= last_query + q_offset - window)
        return cut

    def sees(self, query: Any, first: Any, key: Any, block_kv: int, q_offset: Any, window: Any, kv_len: Any) -> Any:
        """Whether a query may see the key at `key` of a block of keys that begins at `first`, masks aside.

        What a row sees of a block is known before its keys, in numbers that fit in 32 bits.
        """
        q_offset = q_offset if self.shifted else 0
        end = T.min(kv_len, query + q_offset + 1) if self.causal else kv_len
        seen = key < T.max(T.min(end - first, block_kv), 0)
        if self.windowed:
            seen = T.logical_and(seen, key > T.max(T.min(query + q_offset - window - first, block_kv), -1))
        return seen

    def masked(self, product: Any, seen: Any, mask: Any = None) -> Any:
        """The score of a query and a key under the mask; -inf where the query may not see the key."""
        if self.mask == torch.bool:
            seen = T.logical_and(seen, mask != 0)
        elif self.mask is not None:
            product = product + T.cast(mask, product.dtype)
        return T.if_then_else(seen, product, -T.infinity(product.dtype))


def is_shifted(causal: bool, window: int, q_offset: int | torch.SymInt) -> bool:
    """Whether kernels are compiled for queries that may stand anywhere; an offset known at run time only may be any."""
    return window > 0 or (causal and not (isinstance(q_offset, int) and q_offset == 0))


@dataclass(frozen=True)
class Problem:
    """Sizes that decide the cut: sequences times key heads, rows of each (queries times heads of a group), keys, and
    heads of a group; and whether the rows of a group lie evenly spaced (`adjacent`), so that they pack as a view.
    """

    heads: int
    rows: int
    keys: int
    groups: int = 1
    adjacent: bool = True

    def packs(self, block_q: int) -> bool:
        """Whether packing into blocks of `block_q` rows takes no copies, or else saves at least half of each block."""
        return self.adjacent or 2 * self.rows <= self.groups * block_q


def config_for(form: Form, problem: Problem, machine: Machine) -> Config | None:
    """The cut of a problem on a machine; None for heads so wide that not even the smallest tiles fit."""
    problem = typical(problem)
    if machine.is_gpu:
        found = tuned(Config, "attention", machine, shape_class(form, problem))
        if found is not None and (not found.packed or problem.packs(found.block_q)):
            return found
        return _gpu_config(form, problem, machine)
    # As few rows as the queries fill, and tiles of keys that stay in the second-level cache.
    block_q = 4 if problem.rows <= 4 else 16 if problem.rows <= 16 else 64
    return Config(block_q=block_q, block_kv=64, packed=problem.packs(block_q))


def shape_class(form: Form, problem: Problem) -> str | None:
    """Problems that are cut alike; None for those that are not tuned for."""
    if form.dtype.itemsize != 2 or form.mask is not None or form.windowed or not (form.folded and form.exact):
        return None
    if form.score:
        return None
    kind = "causal" if form.causal else "full"
    keys = power_of_two(problem.keys)
    return f"d{form.tile_d},{form.tile_dv} {kind} {problem.heads}x{problem.groups} {rows_class(problem.rows)}x{keys}"


def splits_for(config: Config, problem: Problem, machine: Machine) -> int:
    """How many shares to make of the keys: a block for each SM, but none below four tiles or LEAST_SHARE keys."""
    problem = typical(problem)
    most = problem.keys // max(LEAST_SHARE, 4 * config.block_kv)
    return max(1, min(machine.units // _blocks(config, problem), most))


def _blocks(config: Config, problem: Problem) -> int:
    return problem.heads * -(-problem.rows // config.block_q)


LEAST_SHARE = 512  # keys: joining shares takes longer than a block takes for as many

# Cuts by falling size; the first that fits is taken. Where each warp has rows of its own, weights stay in registers.
LONG = (
    Config(64, 64, 128, stages=1, resident=True, shares=8),
    Config(64, 64, 128, shares=8),
    Config(64, 32, 128, shares=8),
    Config(64, 32, 256, shares=8),
    Config(16, 32, 128, shared_weights=True),
    Config(16, 16, 256, stages=1, shared_weights=True),
    Config(16, 8, 256, stages=1, shared_weights=True),
)
SHORT = (
    Config(16, 128, 128, shared_weights=True),
    Config(16, 64, 128, shared_weights=True),
    *LONG[-3:],
)
WIDE = (
    Config(64, 32, 128, shared_weights=True),
    Config(64, 32, 256, shared_weights=True),
    *LONG[-3:],
)  # float32 and float64
MOST_REGISTERS = {2: 200, 4: 100, 8: 60}  # for accumulators and queries, by the operands' size: what compiles unspilt


# By wgmma, with keys and values by bulk copies: the arithmetic of a step runs beside products, in up to 240 registers.
HOPPER = tuple(
    Config(*cut, shares=8)
    for cut in (
        (192, 128, 384, 2), (128, 128, 256, 2), (128, 96, 256, 2), (128, 64, 256, 3), (128, 64, 256, 2),
        (128, 64, 256, 1), (64, 128, 128, 2), (64, 64, 128, 2),
    )
)  # fmt: skip
HOPPER_REGISTERS = {128: 168, 256: 168, 384: 128}  # for scores, weights and sums, by threads
HOPPER_RATES = {192: 1.15}  # of rows by the rows of a block, measured on an H200; the others' is 1
SHORT_KEYS = 512  # so few that what happens before the first product counts
SIDE_BY_SIDE = 8, 4, 2


def _hopper_config(form: Form, problem: Problem, machine: Machine) -> Config | None:
    """The cut for products by wgmma; None where they do not apply."""
    if machine.target.capability != 90 or form.dtype.itemsize != 2 or form.vector < 8 or problem.rows <= 16:
        return None
    fitting = [c for c in HOPPER if _fits_hopper(c, form, machine) and (c.block_q == 64) == (problem.rows <= 64)]
    if problem.keys <= SHORT_KEYS and problem.rows > 64 and problem.heads * -(-problem.rows // 128) <= machine.units:
        fitting = [c for c in fitting if c.block_kv == 64]

    def duration(config: Config) -> float:
        turns = -(-_blocks(config, problem) // machine.units)
        return turns * config.block_q / HOPPER_RATES.get(config.block_q, 1.0)

    return min(fitting, key=duration, default=None)


def _fits_hopper(config: Config, form: Form, machine: Machine) -> bool:
    """Whether the tiles of queries, keys, values and the result fit, with room for addresses and barriers."""
    held = config.block_q * (config.block_kv * 3 // 2 + form.tile_dv) // config.threads
    rows = config.block_q + config.stages * config.block_kv
    shared = rows * (form.tile_d + form.tile_dv) * form.dtype.itemsize + 4096
    return held <= HOPPER_REGISTERS[config.threads] and shared <= machine.target.shared_limit


@lru_cache(KEPT_CHOICES)
def _gpu_config(form: Form, problem: Problem, machine: Machine) -> Config | None:
    cuts: Sequence[Config] = WIDE if form.dtype.itemsize > 2 else LONG if problem.rows > 16 else SHORT
    cuts = [c for c in cuts if c.block_q == 16 or problem.rows > 16]
    config = _hopper_config(form, problem, machine) or next((c for c in cuts if _fits(c, form, machine)), None)
    if config is None:
        return None
    # Heads of many rows leave hardly a tile unfilled, and apart from each other their blocks see fewer keys.
    few = problem.rows < (2 if form.causal else 4) * problem.groups * config.block_q
    packed = form.grouped and few and problem.packs(config.block_q)
    staged = not packed and form.dtype.itemsize == 2
    config = replace(config, packed=packed, heavy_first=form.causal, staged=staged)
    if form.causal:
        apart = problem.heads if packed else problem.heads * problem.groups
        config = replace(config, side=next((n for n in SIDE_BY_SIDE if apart % n == 0 and apart > n), 1))
    if splits_for(config, problem, machine) > 1:
        return replace(config, split=True, staged=False)
    return config


def _fits(config: Config, form: Form, machine: Machine) -> bool:
    """Whether the tiles fit in registers (with room for addresses) and in shared memory."""
    size, wide = form.dtype.itemsize, 2 if form.dtype == torch.float64 else 1
    held = config.block_q * (form.tile_dv + config.block_kv) * wide
    held += config.block_q * form.tile_d * size // 4 if config.resident else 0
    tiles = config.block_q * form.tile_d + config.stages * config.block_kv * (form.tile_d + form.tile_dv)
    tiles += config.block_q * config.block_kv if config.shared_weights else 0
    return held // config.threads <= MOST_REGISTERS[size] and tiles * size + 2048 <= machine.target.shared_limit
