# SPDX-License-Identifier: Apache-2.0
"""Which queries see a block of keys, and how the backward of attention is cut into blocks on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.attention.spec import Config, Form
from torch_tile.kernels.attention.tiling import SIDE_BY_SIDE, Problem
from torch_tile.kernels.common import KEPT_CHOICES, Machine, typical

PADDING = 384  # rows: a multiple of each `block_q`, so that no block reads statistics past their end


@dataclass(frozen=True)
class Cuts:
    """The cut of the kernel of dq, whose blocks hold queries, and of that of dk and dv, whose blocks hold keys.

    Where `dk` is given, that is a kernel of its own and `dkv` makes dv only: the scores are computed once more, but
    wide heads leave room for twice the keys.
    """

    dq: Config
    dkv: Config
    dk: Config | None = None

    @property
    def of_keys(self) -> tuple[tuple[Config, tuple[str, ...]], ...]:
        """The kernels whose blocks hold keys: their cuts, and what each sums up."""
        return ((self.dkv, ("dk", "dv")),) if self.dk is None else ((self.dkv, ("dv",)), (self.dk, ("dk",)))


def query_blocks(form: Form, config: Config, first_key: Any, q_offset: Any, window: Any, q_len: Any) -> Any:
    """The first block of queries that see one of the `block_kv` keys from `first_key` on, and the end of them."""
    q_offset = q_offset if form.shifted else 0
    first: Any = 0
    end = T.ceildiv(q_len, config.block_q)
    if form.causal:
        first = T.max(0, (first_key - q_offset) // config.block_q)
    if form.windowed:
        last_query = first_key + config.block_kv - 2 + window - q_offset
        end = T.min(end, last_query // config.block_q + 1)
    return first, end


def cuts_queries(
    form: Form, config: Config, step: Any, first_key: Any, q_offset: Any, window: Any, q_len: Any
) -> Any:  # fmt: skip
    """Whether a query of block `step` may not see one of the `block_kv` keys from `first_key` on.

    It may also be padding, where `form.masks_padding`.
    """
    q_offset = q_offset if form.shifted else 0
    parts: list[Any] = []
    if form.masks_padding:
        parts.append(step * config.block_q + config.block_q > q_len)
    if form.causal:
        parts.append(step * config.block_q + q_offset < first_key + config.block_kv - 1)
    if form.windowed:
        parts.append(step * config.block_q + config.block_q - 1 + q_offset - window >= first_key)
    return reduce(T.logical_or, parts) if parts else False


def seen_by(
    form: Form, key: Any, first: Any, query: Any, block_q: int, q_offset: Any, window: Any, q_len: Any
) -> Any:  # fmt: skip
    """Whether a key is seen by the query at `query` of a block of queries that begins at `first`, masks aside.

    None if all are. What a key is seen by is known before a block's queries, in numbers that fit in 32 bits.
    """
    q_offset = q_offset if form.shifted else 0
    seen = None
    if form.causal:
        seen = query >= T.max(T.min(key - q_offset - first, block_q), 0)
    if form.windowed:
        inside = query < T.max(T.min(key - q_offset + window - first, block_q), 0)
        seen = inside if seen is None else T.logical_and(seen, inside)
    if form.masks_padding:
        given = query < T.min(q_len - first, block_q)
        seen = given if seen is None else T.logical_and(seen, given)
    return seen


def cuts_for(form: Form, problem: Problem, machine: Machine) -> Cuts | None:
    """The cuts of a problem on a machine; None for heads so wide that not even the smallest tiles fit."""
    return _cuts_for(form, typical(problem), machine)


@lru_cache(KEPT_CHOICES)
def _cuts_for(form: Form, problem: Problem, machine: Machine) -> Cuts | None:
    if not machine.is_gpu:
        plain = Config(packed=False)
        return Cuts(plain, plain)
    hopper = machine.target.has_wgmma and form.dtype.itemsize == 2 and form.vector >= 8
    kind = HOPPER if hopper else HALVES if form.dtype.itemsize == 2 else WIDE

    def chosen(cuts: Sequence[Config], sums: Sequence[str]) -> Config | None:
        heads = problem.heads * (problem.groups if "dq" in sums else 1)
        found = next((cut for cut in cuts if _fits(cut, form, machine, sums, kind.room(form))), None)
        return None if found is None else _finished(found, form, machine, sums, heads)

    dq, dkv = chosen(kind.dq, ("dq",)), chosen(kind.dkv, ("dk", "dv"))
    if dq is None or dkv is None:
        return None
    if kind is HOPPER and max(form.tile_d, form.tile_dv) <= 64 and not (form.operands or form.score):
        dkv = _finished(SHARING, form, machine, ("dk", "dv"), problem.heads)
    elif dkv.block_kv < WIDE_KEYS and (dv := chosen(kind.dv, ("dv",))) and (dk := chosen(kind.dk, ("dk",))):
        return Cuts(dq, dv, dk)
    return Cuts(dq, dkv)


@dataclass(frozen=True)
class _Kind:
    """Cuts by falling size, of which the first one is taken that fits into `registers` of a thread: for sums, scores,
    their gradients and what of these is rounded. Values of a text take `text` registers of these, and `masked_text`
    where elements of a mask are held as well. `dv` and `dk` are for kernels of their own.
    """

    dq: Sequence[Config]
    dkv: Sequence[Config]
    registers: int
    text: int = 0
    masked_text: int = 0
    dv: Sequence[Config] = ()
    dk: Sequence[Config] = ()

    def room(self, form: Form) -> int:
        """Registers of a thread for tiles."""
        taken = self.text if form.mask is None else self.masked_text
        return self.registers - (taken if form.score else 0)


# Queries and keys of a block, threads, stages.
HOPPER = _Kind(
    (Config(128, 64, 256, 3), Config(128, 64, 256, 2), Config(64, 64, 128, 2), Config(64, 32, 128, 1)),
    (
        Config(64, 128, 256, 2),
        Config(32, 128, 256, 3),
        Config(32, 128, 256, 2),
        Config(64, 64, 128, 2),
        Config(32, 64, 128, 2),
        Config(32, 64, 256, 1),
    ),
    224,
    masked_text=16,
    # Heads of 256 on an H200: twice as fast as 32 x 64 for both, of 1 to 2 % between these and others that fit.
    dv=(Config(64, 128, 256, 2), Config(32, 128, 256, 2), Config(32, 128, 256, 1)),
    dk=(Config(32, 128, 256, 2), Config(32, 128, 256, 1), Config(16, 128, 256, 1)),
)
WIDE_KEYS = 128  # keys of a block below which dk and dv are better made apart: those of two warpgroups of wgmma
# Two blocks of keys on a multiprocessor, for narrow heads: 0 to 7 % less time on an H200, most where a mask is causal.
SHARING = Config(64, 64, 128, 2, blocks=2)
HALVES = _Kind(
    (Config(64, 32, 128, 2), Config(64, 32, 256, 1), Config(32, 16, 128, 1), Config(16, 16, 128, 1)),
    (Config(32, 64, 128, 2), Config(32, 64, 256, 1), Config(16, 32, 128, 1), Config(16, 16, 128, 1)),
    200,
    text=28,
    masked_text=28,
)
WIDE = _Kind(
    tuple(replace(cut, shared_weights=True) for cut in HALVES.dq),
    tuple(replace(cut, shared_weights=True) for cut in HALVES.dkv),
    184,
)  # float32 and float64


def _fits(config: Config, form: Form, machine: Machine, sums: Sequence[str], registers: int) -> bool:
    """Whether a block's sums and tiles fit."""
    size, own, step = form.dtype.itemsize, *_sides(config, sums)
    scores = 2 if sums == ("dv",) else 3
    held = own * (step * scores + _columns(form, sums)) - (own * step if config.shared_weights else 0)
    wide = max(1, size // 4)
    held += own * step * (len(form.slopes) - 1) if "dq" in sums else 0
    return held * wide // config.threads <= registers and _shared(config, form, sums) <= machine.target.shared_limit


def _sides(config: Config, sums: Sequence[str]) -> tuple[int, int]:
    """The rows of a block, and those of a step of its loop."""
    return (config.block_q, config.block_kv) if "dq" in sums else (config.block_kv, config.block_q)


def _columns(form: Form, sums: Sequence[str]) -> int:
    """Of all that a block sums up."""
    return sum(form.tile_dv if name == "dv" else form.tile_d for name in sums)


def _shared(config: Config, form: Form, sums: Sequence[str], stored: int = 0) -> int:
    """Bytes of a block's tiles, of which those of the loop have `stages`, and of results of so many columns."""
    own, step = _sides(config, sums)
    weights = 2 * own * step if config.shared_weights else 0
    held = form.tile_d if sums == ("dv",) else form.tile_d + form.tile_dv
    tiles = own * held + config.stages * step * (form.tile_d + form.tile_dv) + weights + own * stored
    return tiles * form.dtype.itemsize + form.operand_bytes(config) + 4096


def _finished(config: Config, form: Form, machine: Machine, sums: Sequence[str], heads: int) -> Config:
    """Heavy blocks first; few heads side by side, so that what their blocks share stays in the second level; results
    through shared memory, where the tiles of operands leave room for that and dk and dv are made together.
    """
    side = next((n for n in SIDE_BY_SIDE if heads % n == 0 and heads > n), 1)
    # Numbers of 4 bytes that are read across rows take registers that only products by wgmma leave.
    narrow = "dq" in sums or machine.target.has_wgmma or all(x.stored.itemsize < 4 for x in form.operands)
    tiled = narrow and any(x.tiled for x in form.operands)
    room = not tiled or _shared(config, form, sums, _columns(form, sums)) <= machine.target.shared_limit
    staged = form.dtype.itemsize == 2 and room and sums not in (("dk",), ("dv",))
    return replace(config, packed=False, heavy_first=form.causal, side=side, staged=staged, tiled=tiled)
