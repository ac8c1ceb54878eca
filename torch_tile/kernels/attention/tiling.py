# SPDX-License-Identifier: Apache-2.0
"""The tilings of attention on the CPU and on GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from torch_tile.hardware import PER_THREAD, RESERVED, WARP, WARPGROUP, equal_share
from torch_tile.kernels.attention.sequences import DENSE
from torch_tile.kernels.attention.spec import Config, Spec
from torch_tile.kernels.common import KEPT_CHOICES, Machine, typical
from torch_tile.kernels.footprint import Footprint, Part, Tile
from torch_tile.kernels.measured_rules import verdict


@dataclass(frozen=True)
class Problem:
    """Sizes that decide the tiling: sequences times key heads, rows of each (queries times heads of a group), keys, and
    heads of a group. `adjacent` says whether the rows of a group lie evenly spaced, so that they pack as a view.
    """

    heads: int
    rows: int
    keys: int
    groups: int = 1
    adjacent: bool = True

    def packs(self, block_q: int) -> bool:
        """Return whether packing rows into blocks of `block_q` needs no copies, or saves at least half of
        each block.
        """
        return self.adjacent or 2 * self.rows <= self.groups * block_q


def config_for(spec: Spec, problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of a problem on a machine. Return None if even the smallest tiles do not fit the head size."""
    any_rows = isinstance(problem.rows, torch.SymInt)  # another call may have more
    problem = typical(problem)
    if machine.is_gpu:
        config = _gpu_config(spec, problem, machine)
        apart = config is None or not config.split or spec.layout.ragged or any_rows or problem.rows > config.block_q
        if config is None or apart or (spec.layout.page and not config.shared_probs):
            return config
        return replace(config, one_tile=True)
    # As few rows as the queries fill, and tiles of keys that stay in the second-level cache.
    block_q, block_kv = 4 if problem.rows <= 4 else 16 if problem.rows <= 16 else 64, 64
    if spec.lists is not None:
        block_q, block_kv = math.gcd(block_q, spec.lists.own), math.gcd(block_kv, spec.lists.other)
    packed, dense = (
        problem.packs(block_q) and _may_pack(spec),
        not (spec.layout.ragged or spec.layout.page or spec.lists),
    )
    split = dense and problem.keys > LONGEST_SPLIT
    return Config(block_q=block_q, block_kv=block_kv, packed=packed, split=split)


def splits_for(config: Config, problem: Problem, machine: Machine) -> int:
    """Choose the number of splits of the keys: a block for each SM, but none below four tiles or LEAST_SPLIT keys.
    Fewer are taken if their longest has no more tiles.

    Blocks of few rows mostly wait for memory: as many as `config.blocks` run on an SM at once. Those that widen float8
    keys are bound by arithmetic, so splits also fill the last of several waves.
    A CPU splits so that none has more than LONGEST_SPLIT keys.
    """
    problem = typical(problem)
    if not machine.is_gpu:
        return max(1, -(-problem.keys // LONGEST_SPLIT))
    most = problem.keys // max(LEAST_SPLIT, 4 * config.block_kv)
    room, blocks = machine.num_sms * (config.blocks if config.shared_probs else 1), _blocks(config, problem)
    if config.narrow and blocks > room:
        return min(range(1, max(1, min(MOST_IN_WAVES, most)) + 1), key=lambda n: (-(-blocks * n // room) / n, n))
    splits, tiles = max(1, min(room // blocks, most)), max(1, -(-problem.keys // config.block_kv))
    return -(-tiles // -(-tiles // splits))  # fewer whose longest is as long


def entries_for(config: Config, spec: Spec, problem: Problem, splits: int) -> int:
    """Choose how many entries of a table of pages a split loads at once: one a thread, if these are enough.

    Where sizes are known at run time only, another call may have more. A window begins where only the sequence's length
    tells. Tiles of more rows are copied by a warp of its own, which looks entries up itself.
    """
    page, keys = spec.layout.page, config.block_kv
    known = (
        page and not spec.layout.ragged and not spec.windowed and not isinstance(problem.keys * splits, torch.SymInt)
    )
    if not known or not config.shared_probs or not spec.layout.fits(keys):
        return 0
    enough = -(-problem.keys // page) * max(page // keys, 1) <= splits * config.threads
    return config.threads if enough else 0


def _blocks(config: Config, problem: Problem) -> int:
    """Count the blocks of a launch."""
    return problem.heads * -(-problem.rows // config.block_q)


MOST_IN_WAVES = 3  # splits of a launch of several waves: what was measured
LONGEST_SPLIT = 2**18  # keys that a CPU sums up in float32 one after the other; 2**24 were wrong by 6e-3
LEAST_SPLIT = 512  # keys: joining splits takes longer than a block takes for as many

# Tilings by falling size; the first that fits is taken. Where each warp has rows of its own, weights stay in registers.
LONG = (
    Config(64, 64, 128, stages=1, resident=True, partial_sums=8),
    Config(64, 64, 128, partial_sums=8),
    Config(64, 32, 128, partial_sums=8),
    Config(64, 32, 256, partial_sums=8),
    Config(16, 32, 128, shared_probs=True),
    Config(16, 16, 256, stages=1, shared_probs=True),
    Config(16, 8, 256, stages=1, shared_probs=True),
)
SHORT = (Config(16, 128, 128, shared_probs=True), Config(16, 64, 128, shared_probs=True), *LONG[-3:])
# Over keys of float8, whose products widen them: several blocks on an SM, so that loads and arithmetic overlap. Tensor
# cores take 16 keys at once, and multiply-adds of float16 by float8 are slow: no tiling has 8.
NARROW = (
    *(
        Config(16, keys, 128, stages, resident=True, shared_probs=True, partial_sums=keys, blocks=blocks, narrow=True)
        for keys, stages, blocks in ((128, 3, 2), (64, 3, 3), (64, 2, 3), (64, 2, 2), (64, 2, 1))
    ),
    *(replace(c, narrow=True) for c in SHORT[1:] if c.block_kv % 16 == 0),
)
# Over pages smaller than a tile, whose rows a block looks up and copies one by one: others multiply meanwhile.
SMALL_PAGES = Config(16, 64, 128, 3, resident=True, shared_probs=True, partial_sums=64, blocks=2)
NARROW_REGISTERS = 104  # of a thread, besides queries, sums and scores
WIDE = (
    Config(64, 32, 128, shared_probs=True),
    Config(64, 32, 256, shared_probs=True),
    *LONG[-3:],
)  # float32 and float64
MOST_REGISTERS = {2: 200, 4: 100, 8: 60}  # for accumulators and queries, by the operands' size: what compiles unspilt
# Fewer registers for operands of scores, for addresses of elements that are read one by one, and for walking lists.
SCORE_REGISTERS, LOOSE_REGISTERS, LIST_REGISTERS = 30, 42, 34
LEAST_REGISTERS = 12  # what remains for the smallest tiles, whatever else takes registers


# By wgmma, with keys and values by bulk copies: the arithmetic of a step runs beside products, in up to 240 registers.
# Three warpgroups go in step otherwise, each with its exponentials where the others have theirs.
HOPPER = tuple(
    Config(*tiling, partial_sums=8, ping_pong=tiling[2] == 384)
    for tiling in (
        (192, 128, 384, 2), (128, 128, 256, 2), (128, 96, 256, 2), (128, 64, 256, 3), (128, 64, 256, 2),
        (128, 64, 256, 1), (64, 128, 128, 2), (64, 64, 128, 2),
    )
)  # fmt: skip
HOPPER_REGISTERS = {128: 168, 256: 168, 384: 128}  # for scores, weights and sums, by threads
SHORT_KEYS = 512  # so few that the work before the first product counts
# Blocks that share an SM, by the widest heads they suit: while one loads its first tiles or stores, others multiply.
SHARING = {
    64: Config(64, 96, 128, 2, partial_sums=8, blocks=3),
    128: Config(64, 64, 128, 2, partial_sums=8, blocks=2, resident=True),
}
# Under masks, whose tiles stand beside those of keys and values.
SHARING_MASKED = {64: Config(64, 64, 128, 2, partial_sums=8, blocks=3), 128: SHARING[128]}
SIDE, SIDE_BY_SIDE = 16, (8, 4, 2)
LEAST_AT_ONCE = 4  # heads: fewer were not measured
CACHED = 35 << 20  # bytes of keys and values that stay in the second-level cache, of 50 MiB


def _hopper_config(spec: Spec, problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling for products by wgmma. Return None where wgmma does not apply."""
    if not machine.target.has_wgmma or spec.dtype.itemsize != 2 or spec.vector < 8 or problem.rows <= 16:
        return None
    if spec.scaled:  # the warps that multiply widen keys first, which mma.sync waits for as well
        return None
    if (sharing := _sharing(spec, problem, machine)) is not None:
        return sharing
    fitting = [
        c
        for c in HOPPER
        if spec.layout.fits(c.block_kv)
        and _fits_hopper(c, spec, machine)
        and divides(spec, c)
        and (c.block_q == 64) == (problem.rows <= 64)
    ]
    few = problem.keys <= SHORT_KEYS and problem.rows > 64
    if _is_loose(HOPPER[1], spec, problem) or (few and problem.heads * -(-problem.rows // 128) <= machine.num_sms):
        fitting = [c for c in fitting if c.block_kv == 64]

    def duration(config: Config) -> float:
        """Estimate the time of a tiling: waves of blocks by the rate of its tile."""
        rate: float = verdict("attention.rate", machine.target, 1.0, rows=config.block_q)
        return -(-_blocks(config, problem) // machine.num_sms) * config.block_q / rate

    return min(fitting, key=duration, default=None)


def _is_loose(config: Config, spec: Spec, problem: Problem) -> bool:
    """Return whether mask operands are read from memory element by element, with other elements for each row."""
    if _packed(config, spec, problem):
        return any("k" in x.dims for x in spec.operands)
    return any(x.dims.endswith("qk") and not x.tiled for x in spec.operands)


def _sharing(spec: Spec, problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling of small blocks, several of which share an SM; None where larger blocks are faster."""
    tilings = SHARING_MASKED if spec.operands else SHARING
    width = max(spec.tile_d, spec.tile_dv)
    widest = next((n for n in tilings if width <= n), 0)
    if not widest or spec.lists or spec.score or spec.windowed or not (spec.folded or spec.mask):
        return None
    # Packed rows test for each tile if a causal mask cuts it. Three blocks on an SM leave no registers for that.
    config = tilings[128 if spec.causal and _packed(tilings[widest], spec, problem) else widest]
    needed = footprint(replace(config, staged=True, tiled=True), spec, bulk=True).bytes
    room = (machine.target.shared_limit + RESERVED) // (needed + RESERVED)
    config = replace(config, blocks=min(config.blocks, room))
    blocks = _blocks(config, problem)
    if (
        config.blocks < 2
        or not spec.layout.fits(config.block_kv)
        or (problem.rows <= config.block_q and blocks <= machine.num_sms)
    ):
        return None
    waves = blocks / (config.blocks * machine.num_sms)
    most = verdict("attention.shared_sm_keys", machine.target, 0, width=width, waves=waves, causal=spec.causal)
    return config if problem.keys <= most else None


def _fits_hopper(config: Config, spec: Spec, machine: Machine) -> bool:
    """Return whether sums and tiles fit, counting the fewer stages that the compiler would then take."""
    held = config.block_q * (config.block_kv * 3 // 2 + spec.tile_dv) // config.threads
    config = replace(config, staged=True, through_queries=_through_queries(spec))
    tried = config, replace(config, stages=1, tiled=True)
    fits = all(footprint(c, spec, bulk=True).fits(machine.target) for c in tried)
    # Three warpgroups leave each no registers for what changes scores.
    registers = 0 if spec.score and config.threads == 384 else HOPPER_REGISTERS[config.threads]
    return held <= registers and fits


def footprint(config: Config, spec: Spec, bulk: bool) -> Footprint:
    """Compute the shared memory of queries, keys, values, operands, exchanged weights and a staged result."""
    rows, keys, bits = config.block_q, config.block_kv, 8 * spec.dtype.itemsize
    where = (Part.BEFORE,) if config.resident else (Part.BEFORE, Part.LOOP)
    tiles = [Tile(rows, spec.tile_d, bits, 2 if config.queries_ahead else 1, where)]
    columns_of: tuple[int, ...] = (spec.tile_d, spec.tile_dv)
    stages = config.stages
    if spec.scaled:  # float8 as it came
        tiles += [Tile(keys, columns, 8, stages, (Part.LOOP,)) for columns in columns_of]
        tiles += [Tile(1, keys, 32, stages, (Part.LOOP,)) for _ in columns_of]
        # Widened into a tile beside it, which keys and values take in turns, or in registers.
        columns_of = columns_of[: 0 if config.narrow else 1 if spec.tile_d == spec.tile_dv else 2]
        stages = 1
    tiles += [Tile(keys, columns, bits, stages, (Part.LOOP,)) for columns in columns_of]
    tiles += [Tile(rows, keys, bits, parts=(Part.LOOP,))] if config.shared_probs else []
    tiles += [Tile(1, config.entries, 32, parts=(Part.BEFORE, Part.LOOP))] if config.entries else []
    if config.staged and not config.through_queries:
        tiles.append(Tile(rows, spec.tile_dv, bits, parts=(Part.LEAVING,)))
    return Footprint((*tiles, *spec.operand_tiles(config)), bulk)


@lru_cache(KEPT_CHOICES)
def _gpu_config(spec: Spec, problem: Problem, machine: Machine) -> Config | None:
    """Choose the first tiling that fits a GPU, and its launch order."""
    short = NARROW if spec.scaled else SHORT
    tilings: Sequence[Config] = WIDE if spec.dtype.itemsize > 2 else LONG if problem.rows > 16 else short
    if _reads_small_pages(spec, problem, machine):
        tilings = [SMALL_PAGES, *tilings]
    tilings = [c for c in tilings if divides(spec, c) and (c.block_q == 16 or problem.rows > 16)]
    tilings = [c for c in tilings if spec.layout.fits(c.block_kv)] or tilings  # else keys are gathered one by one
    hopper = _hopper_config(spec, problem, machine)
    config = hopper or next((c for c in tilings if _fits(c, spec, problem, machine)), None)
    if config is None:
        return None
    packed = _packed(config, spec, problem)
    staged = not packed and spec.dtype.itemsize == 2
    tiled = not packed and any(x.tiled for x in spec.operands)
    through = staged and hopper is not None and _through_queries(spec)
    config = replace(
        config, packed=packed, heavy_first=spec.causal, staged=staged, tiled=tiled, through_queries=through
    )
    if spec.causal:
        config = replace(config, side=_side(config, spec, problem, machine))
    if splits_for(config, problem, machine) > 1:
        return replace(config, split=True, staged=False)
    config = replace(config, own_keys=hopper is not None and _has_own_keys(config, spec))
    if hopper is not None and _may_persist(config, spec):
        lasting = replace(config, persistent=machine.num_sms, ping_pong=True, through_queries=False)
        ahead = replace(lasting, queries_ahead=True)
        ahead = ahead if footprint(ahead, spec, bulk=True).fits(machine.target) else lasting
        early = replace(ahead, early=ahead.queries_ahead)
        if (rounds := _rounds_by_length(config, spec, problem, machine)) is not None:
            return replace(early, paired=True, rounds_by_length=rounds, halved=True)
        if _runs_in_order(config, spec, problem, machine):
            return replace(early, in_order=True)
        if _by_length(config, spec, problem, machine):
            return early
    return config


def _reads_small_pages(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether blocks that share an SM read small pages faster than blocks that fill one."""
    few = problem.rows <= 16 and spec.dtype.itemsize == 2 and not spec.scaled and bool(spec.layout.page)
    waves = _blocks(SMALL_PAGES, problem) / machine.num_sms
    return few and verdict("attention.small_pages", machine.target, False, page=spec.layout.page, waves=waves)


def _has_own_keys(config: Config, spec: Spec) -> bool:
    """Return whether each warpgroup skips key tiles that its mask hides, by measurements.

    Tiles of operands, and values that are cleared behind a sequence's end, want all warpgroups in each step.
    """
    three = config.threads == 3 * WARPGROUP and spec.causal and spec.backwards(config)
    return three and spec.layout.fixed and not spec.operands


def _through_queries(spec: Spec) -> bool:
    """Return whether a result fits into the shared memory of its queries, which nothing reads by then."""
    return spec.tile_dv <= spec.tile_d and not spec.layout.ragged


def _may_persist(config: Config, spec: Spec) -> bool:
    """Return whether blocks may take tile after tile: where that was measured."""
    plain = not (spec.operands or spec.score or spec.windowed or spec.lists)
    one = spec.layout == DENSE and config.blocks == 1 and config.block_q == 128
    return plain and one and config.staged and not config.packed


def _tiles(config: Config, problem: Problem) -> int:
    """Count the tiles of all heads, whose rows are apart."""
    return problem.heads * problem.groups * -(-(problem.rows // problem.groups) // config.block_q)


def _rounds_by_length(config: Config, spec: Spec, problem: Problem, machine: Machine) -> int | None:
    """Return how many of the last rounds of pairs go by length; None where blocks take no pairs.

    Pairs of several rounds want an even number of tiles a head: of odd ones, some pairs are of two long tiles.
    """
    pairs = _tiles(config, problem) / (2 * machine.num_sms)
    equal = spec.tile_d == spec.tile_dv == 128 and not spec.grouped and problem.rows >= 2 * config.block_q
    if not spec.causal or not equal or (pairs > 1 and -(-problem.rows // config.block_q) % 2):
        return None
    found: int | None = verdict(
        "attention.rounds_by_length", machine.target, None, pairs=pairs, keys=problem.keys, lse=spec.lse
    )
    return found


def _runs_in_order(config: Config, spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether blocks take tile after tile where no mask makes tiles unequal.

    The next tile's loads then run beside the end of a tile.
    """
    waves = _tiles(config, problem) / machine.num_sms
    equal = not spec.causal and spec.tile_d == spec.tile_dv == config.block_kv == 128
    return equal and verdict("attention.in_order", machine.target, False, waves=waves, keys=problem.keys)


def _by_length(config: Config, spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether blocks take the longest tiles of all heads first under a causal mask.

    A cache that holds the keys and values of all heads, as of grouped ones, is filled from memory once.
    """
    waves = _tiles(config, problem) / machine.num_sms
    cached = problem.heads * _bytes_of_head(spec, problem) / CACHED
    return spec.causal and verdict(
        "attention.by_length", machine.target, False, waves=waves, keys=problem.keys, cached=cached,
        grouped=spec.grouped, lse=spec.lse,
    )  # fmt: skip


def _packed(config: Config, spec: Spec, problem: Problem) -> bool:
    """Return whether the rows of a block cover all heads of a group.

    Heads of many rows leave hardly a tile unfilled, and apart from each other their blocks see fewer keys.
    """
    few = problem.rows < (2 if spec.causal else 4) * problem.groups * config.block_q
    return spec.grouped and few and problem.packs(config.block_q) and _may_pack(spec)


def _may_pack(spec: Spec) -> bool:
    """Return whether a block's rows may be of several heads."""
    return not spec.layout.ragged and spec.lists is None


def divides(spec: Spec, config: Config) -> bool:
    """Return whether the tiles of a kernel over blocks of queries divide the blocks that lists name."""
    return spec.lists is None or spec.lists.fits(config.block_q, config.block_kv)


def _side(config: Config, spec: Spec, problem: Problem, machine: Machine) -> int:
    """Return how many heads run side by side under a causal mask: as many as have their keys and values in the cache.
    Where all blocks of some heads run at once, these are enough.

    1 stands for all: blocks then run by falling work, whatever their head, of which those that share an SM have more.
    """
    apart = problem.heads if config.packed else problem.heads * problem.groups
    each = _bytes_of_head(spec, problem)
    if config.blocks > 1 and problem.heads * each <= CACHED:
        return 1
    at_once = config.blocks * machine.num_sms * apart // max(_blocks(config, problem), 1)
    most = min(max(CACHED // each, 8), at_once if at_once >= LEAST_AT_ONCE else SIDE)
    return next((n for n in (SIDE, *SIDE_BY_SIDE) if n <= most and apart % n == 0 and apart > n), 1)


def _bytes_of_head(spec: Spec, problem: Problem) -> int:
    """Count the bytes of a head's keys and values."""
    return problem.keys * (spec.tile_d + spec.tile_dv) * spec.dtype.itemsize


def _fits(config: Config, spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether the tiles fit in registers (with room for addresses) and in shared memory."""
    size, wide = spec.dtype.itemsize, 2 if spec.dtype == torch.float64 else 1
    held = config.block_q * (spec.tile_dv + config.block_kv) * wide
    held += config.block_q * spec.tile_d * size // 4 if config.resident else 0
    shared = footprint(replace(config, tiled=True), spec, bulk=False)
    spare = LOOSE_REGISTERS if _is_loose(config, spec, problem) else SCORE_REGISTERS if spec.score or spec.mask else 0
    # Queries in registers cost more of them than they have numbers, where lists are walked.
    spare += LIST_REGISTERS * (2 if config.resident else 1) if spec.lists else 0
    registers = max(MOST_REGISTERS[size] - spare, LEAST_REGISTERS)
    together = config.blocks * (shared.bytes + RESERVED) <= machine.target.shared_limit + RESERVED
    if config.narrow and config.resident:  # all warps hold the queries, in what blocks leave each other of registers
        sums = config.block_q * (spec.tile_dv + config.block_kv) // config.threads
        own = config.block_q * spec.tile_d * size // 4 // WARP + sums
        most = min(PER_THREAD, equal_share(config.threads, config.blocks)) - NARROW_REGISTERS
        # Addresses of copies by threads take registers that three blocks do not leave.
        return own <= most - spare and together and (config.blocks < 3 or machine.target.has_tma)
    return held // config.threads <= registers and shared.fits(machine.target) and (config.blocks == 1 or together)


def side_by_side(heads: int, most: int = SIDE_BY_SIDE[0]) -> int:
    """Return how many heads run side by side: the data that their blocks share stays in the second-level cache."""
    return next((n for n in SIDE_BY_SIDE if n <= most and heads % n == 0 and heads > n), 1)
