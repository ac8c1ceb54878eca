# SPDX-License-Identifier: Apache-2.0
"""Gradients of scaled dot-product attention in q, k and v (FlashAttention-2, arXiv:2307.08691, section 3.1.2).

Probabilities are computed again from the forward's log-sum-exp, tile by tile. There are two kernels. Blocks of queries
loop over keys and sum up dq. Blocks of keys loop over queries and sum up dk and dv. The widest heads have a kernel each
for dk and dv. One block keeps every sum in registers in one order, so that results are the same from run to run. One
kernel for all gradients saves two products of seven. Its blocks add to dq in memory in any order (`fused_backward.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention import score_mod as score_text
from torch_tile.kernels.attention.args import AttentionArgs, AttentionBackwardArgs
from torch_tile.kernels.attention.arguments import bounded, empty_beside, placed_beside
from torch_tile.kernels.attention.block_lists import Listed
from torch_tile.kernels.attention.forward import default_scale, scores, softmax_with_lse, store_rows, store_staged
from torch_tile.kernels.attention.fused_backward import fused_tiling, launch as launch_fused
from torch_tile.kernels.attention.operands import Rows, load, prepare_operands
from torch_tile.kernels.attention.queries_of_keys import PADDING, masks_queries, query_blocks, seen_by
from torch_tile.kernels.attention.sequences import (
    DENSE,
    Given,
    Layout,
    Sequences,
    Span,
    after,
    clear_past,
    dense_span,
    load_keys,
    plan,
    store_own,
)
from torch_tile.kernels.attention.softmax import hide_keys, weigh
from torch_tile.kernels.attention.spec import Config, Spec, spec_of
from torch_tile.kernels.attention.tiling import LIST_REGISTERS, Problem, divides, side_by_side
from torch_tile.kernels.common import (
    KEPT_CHOICES,
    LOG2_E,
    Machine,
    compute_dtype,
    dense_last,
    dynamic,
    entry_function,
    machine_of,
    round_up,
    strided,
    typical,
)
from torch_tile.kernels.epilogue.autodiff import vjp
from torch_tile.kernels.footprint import Footprint, Part, Tile
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.measured_rules import verdict

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(*given: Any, **named: Any) -> Gradients:
    """Compute `tile.attention_backward` in plain torch, from the arguments of `AttentionBackwardArgs`.

    Sums are in float32 (float64 for float64). It does not read `out` and `lse`, so that it can be differentiated in
    what they were computed from.
    """
    args: AttentionBackwardArgs[torch.Tensor] = AttentionBackwardArgs(*given, **named)
    q, k, v = args.q, args.k, args.v
    dq, dk, dv, kept = gradients(args.grad, args.forward, args.keep)
    return placed_beside(dq, q), placed_beside(dk, k), placed_beside(dv, v), kept.to(q.dtype)


def names_in(keep: str) -> tuple[str, ...]:
    """Split `keep` into the names of the operands whose gradients are stored."""
    return tuple(keep.split(",")) if keep else ()


def empty_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: str) -> Gradients:
    """Allocate the tensors that `attention_backward` writes."""
    kept = q.new_empty((len(names_in(keep)), *q.shape[:3], k.shape[2]))
    return empty_beside(q, q.shape[3]), empty_beside(k, k.shape[3]), empty_beside(v, v.shape[3]), kept


def gradients(grad: torch.Tensor, args: AttentionArgs[torch.Tensor], keep: str = "") -> Gradients:
    """Compute the gradients of `reference` in the dtype of sums. Hidden scores have gradient 0 at any slope."""
    q, k, v, score = args.q, args.k, args.v, args.score
    offset: Any = args.q_offset
    compute = compute_dtype(q.dtype)
    scale = default_scale(q.shape[3]) if args.scale is None else args.scale
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    shape = (batch, kv_heads, heads // kv_heads if kv_heads else 1, q_len, kv_len)
    qc, kc, vc = (t.to(compute) for t in (q, k, v))
    p, _ = softmax_with_lse(scores(args._replace(q=qc, k=kc)))
    p, grad = p.reshape(shape), grad.to(compute).reshape(*shape[:4], v_dim)
    dv = torch.matmul(p.mT, grad).sum(2)
    dp = torch.matmul(grad, vc.unsqueeze(2).mT)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    terms = {"acc0": ds, "mask": ds}
    if score:
        products = scores(AttentionArgs(qc, kc, vc, scale=scale))
        by_text = vjp(score, score_text.inputs(products, args.aux or (), offset), ds.reshape(products.shape))
        terms = {name: x.expand_as(products).reshape(shape).masked_fill(p == 0, 0) for name, x in by_text.items()}
        terms["mask"] = ds
    of_product, *kept = (terms.get(name, torch.zeros_like(ds)) for name in ("acc0", *names_in(keep)))
    dq = torch.matmul(of_product, kc.unsqueeze(2)).reshape(q.shape) * scale
    dk = torch.matmul(of_product.mT, qc.reshape(*shape[:4], head_dim)).sum(2) * scale
    stacked = torch.stack(kept) if kept else ds.new_empty(0, *shape)
    return dq, dk, dv, stacked.reshape(len(kept), batch, shape[1] * shape[2], q_len, kv_len)


@entry_function(AttentionBackwardArgs, reference, lambda args: empty_results(args.q, args.k, args.v, args.keep))
def attention_backward(
    args: AttentionBackwardArgs[torch.Tensor], results: Gradients, tilings: Tilings | Config | None = None
) -> bool:
    """Compute the gradients of attention as `reference` does. `tilings` overrides the choice of tilings: a
    `Config` is that of the one kernel of `fused_backward.py`.
    """
    able = args.q.numel() and args.k.numel() and args.v.numel()
    return bool(able) and run(args, results, machine_of(args.q), tilings)


def run(
    args: AttentionBackwardArgs[torch.Tensor],
    results: Gradients,
    machine: Machine,
    tilings: Tilings | Config | None,
    sequences: Sequences | None = None,
    lists: Listed | None = None,
) -> bool:
    """Launch the kernels of the gradients on a machine into `results`. No tensor but the last result is empty. Return
    whether there are tilings, else nothing is launched.

    Of ragged `sequences`, tensors are those of one long sequence. Of `lists`, queries see the blocks of keys that these
    name.
    """
    forward = score_text.as_mask(args.forward)
    args = args._replace(**forward._asdict())
    grad, out, lse, keep = args.grad, args.out, args.lse, args.keep
    q, k, v, causal, window = forward.q, forward.k, forward.v, forward.causal, forward.window
    layout = DENSE if sequences is None else sequences.layout
    batch, kv_heads, kv_len, head_dim = k.shape
    q_len, groups = q.shape[2], q.shape[1] // kv_heads
    dense = [dense_last(x) for x in (q, k, v, grad, out)]
    by_vectors = *dense, *results[:3]
    spec, operands = spec_of(forward, by_vectors, machine, layout, lists, folded=True, keep=names_in(keep))
    problem = Problem(batch * kv_heads, groups * q_len, kv_len, groups)
    if sequences is not None:
        rows, most_keys = groups * torch.sym_max(sequences.most_queries, 1), torch.sym_max(sequences.most_keys, 1)
        problem = Problem(sequences.count * kv_heads, rows, most_keys, groups)
    tilings = tilings or fused_tiling(spec, problem, machine) or tilings_for(spec, problem, machine)
    if tilings is None:
        return False
    shape = (batch, kv_heads, groups, q_len)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        """Split the head dimension into key heads and the heads of each group."""
        made: torch.Tensor = x.unflatten(1, shape[1:3])
        return made

    count = 0 if sequences is None else sequences.count + 1  # each has rows of whole blocks
    statistics = lse.new_empty(*shape[:3], spec.row_statistics, round_up(q_len, PADDING) + count * PADDING)
    number = float(default_scale(head_dim) if forward.scale is None else forward.scale)
    options = (number, forward.q_offset, bounded(window))
    queries, keys, values, grads, outs = dense
    dq, dk, dv, all_kept = results
    tensors = grouped(queries), keys, values, *operands
    # No block stores gradients of scores that are never visible.
    if isinstance(tilings, Config):
        given = (grouped(queries), keys, values, grouped(grads), grouped(outs), lse.contiguous().view(shape))
        launch_fused(tilings, spec, machine, given, statistics, (grouped(dq), dk, dv), options)
        return True
    kept = [grouped(x.zero_() if causal or window or lists else x) for x in all_kept]
    of_queries = [] if sequences is None else sequences.tensors(q_len, tilings.dq.block_q)
    by_keys = None if lists is None else lists.by_keys(-(-kv_len // lists.keys))
    machine.kernel(query_gradients)(tilings.dq, spec)(
        *tensors,
        *kept,
        *of_queries,
        *([] if lists is None else lists.tensors),
        grouped(grads),
        grouped(outs),
        lse.contiguous().view(shape),
        grouped(dq),
        statistics,
        *options,
    )
    for tiling, outputs in tilings.of_keys:
        of_keys = [] if sequences is None else sequences.tensors(kv_len, tiling.block_kv)
        of_keys = of_keys if by_keys is None else by_keys.tensors
        own = replace(spec, keep=(), lists=None if by_keys is None else by_keys.spec)
        machine.kernel(key_gradients)(tiling, own, outputs)(
            *tensors, *of_keys, grouped(grads), statistics, dk, dv, *options
        )
    return True


# Tilings of attention's backward on the CPU and on GPUs.


def statistics_row(span: Span) -> Any:
    """Return the first row of a ragged sequence's softmax statistics. Each sequence has whole blocks of rows."""
    return (span.first_query + PADDING * span.group) // PADDING * PADDING


def _own_statistics(layout: Layout, span: Span) -> Any:
    """Return the first row of a block's softmax statistics."""
    return statistics_row(span) + span.first if layout.ragged else span.first


@dataclass(frozen=True)
class Tilings:
    """Tilings of two kernels: that of dq, whose blocks hold queries, and that of dk and dv, whose blocks hold keys.

    With `dk`, that is a kernel of its own and `dkv` makes dv only. The scores are computed once more, but wide heads
    leave room for twice the keys.
    """

    dq: Config
    dkv: Config
    dk: Config | None = None

    @property
    def of_keys(self) -> tuple[tuple[Config, tuple[str, ...]], ...]:
        """Return each kernel whose blocks hold keys: its tiling and the gradients that it sums."""
        return ((self.dkv, ("dk", "dv")),) if self.dk is None else ((self.dkv, ("dv",)), (self.dk, ("dk",)))


def tilings_for(spec: Spec, problem: Problem, machine: Machine) -> Tilings | None:
    """Choose the tilings of the dq and dk/dv kernels for a problem; None if even the smallest do not fit."""
    return _tilings_for(spec, typical(problem), machine)


@lru_cache(KEPT_CHOICES)
def _tilings_for(spec: Spec, problem: Problem, machine: Machine) -> Tilings | None:
    """Choose the first tiling of each kernel that fits the machine."""
    if not machine.is_gpu:
        plain = Config(packed=False)
        if (lists := spec.lists) is not None:
            plain = Config(math.gcd(64, lists.own), math.gcd(64, lists.other), packed=False)
        return Tilings(plain, plain)
    kinds = [HALVES if spec.dtype.itemsize == 2 else WIDE]
    if machine.target.has_wgmma and spec.dtype.itemsize == 2 and spec.vector >= 8:
        # The smallest blocks of lists are divided by tiles of mma.sync alone.
        kinds = [HOPPER, *kinds] if spec.lists is not None else [HOPPER]
    found = (_of_kind(kind, spec, problem, machine) for kind in kinds)
    return next((tilings for tilings in found if tilings is not None), None)


def _of_kind(kind: _Candidates, spec: Spec, problem: Problem, machine: Machine) -> Tilings | None:
    """Choose the first tiling of each kernel that fits the machine, among those of a kind."""

    def chosen(tilings: Sequence[Config], outputs: Sequence[str]) -> Config | None:
        """Return the first candidate that fits the kernel with these outputs."""
        heads = problem.heads * (problem.groups if "dq" in outputs else 1)
        fitting = (x for x in tilings if divides(spec, x) and _fits(x, spec, machine, outputs, kind.budget))
        found = next(fitting, None)
        return None if found is None else _finished(found, spec, machine, outputs, heads)

    dq = chosen(kind.dq, ("dq",))
    # The kernel of dq writes the statistics of ragged sequences in whole blocks, which the other one must not exceed.
    whole = [c for c in kind.dkv if spec.layout.fixed or (dq and dq.block_q % c.block_q == 0)]
    if machine.target.has_wgmma and spec.lists is not None:  # three warpgroups have too few registers to walk lists
        whole = [c for c in whole if c.threads == 128]
    dkv = chosen(whole, ("dk", "dv"))
    if dq is None or dkv is None:
        return None
    sharing = verdict("attention_backward.shared_sm", machine.target, False, width=max(spec.tile_d, spec.tile_dv))
    # The steps of lists take registers that blocks which share a multiprocessor do not have.
    if kind is HOPPER and sharing and not (spec.operands or spec.score or spec.lists):
        dkv = _finished(SHARING, spec, machine, ("dk", "dv"), problem.heads)
    elif (
        not spec.lists
        and dkv.block_kv < WIDE_KEYS
        and (dv := chosen(kind.dv, ("dv",)))
        and (dk := chosen(kind.dk, ("dk",)))
    ):
        return Tilings(dq, dv, dk)
    return Tilings(dq, dkv)


@dataclass(frozen=True)
class _Budget:
    """The registers of a thread, by what its products compile to.

    They hold sums, scores, gradients of scores, and the rounded copies of these. Values of a text take `text` of them,
    or `masked_text` where elements of a mask are held as well. Walking lists takes `lists` of them. The kernel of dq
    takes `dq` of them beside its tiles.
    """

    registers: int
    text: int = 0
    masked_text: int = 0
    lists: int = 0
    dq: int = 0

    def room(self, spec: Spec, outputs: Sequence[str]) -> int:
        """Return the registers of a thread that remain for tiles after other values."""
        taken = self.text if spec.mask is None and spec.layout.fixed else self.masked_text
        taken = (taken if spec.score else 0) + (self.lists if spec.lists else 0) + (self.dq if "dq" in outputs else 0)
        return self.registers - taken


WGMMA = _Budget(224, masked_text=16)
MMA_SYNC = _Budget(200, text=28, masked_text=28, lists=LIST_REGISTERS)
WIDE_NUMBERS = _Budget(184, dq=64)  # float32 and float64; heads of 192 spilled without `dq`


@dataclass(frozen=True)
class _Candidates:
    """The candidate tilings of each gradient, by falling size, within the `budget` of registers."""

    dq: Sequence[Config]
    dkv: Sequence[Config]
    budget: _Budget
    dv: Sequence[Config] = ()
    dk: Sequence[Config] = ()


# Queries and keys of a block, threads, stages.
HOPPER = _Candidates(
    (Config(128, 64, 256, 3), Config(128, 64, 256, 2), Config(64, 64, 128, 2), Config(64, 32, 128, 1)),
    (
        Config(64, 128, 256, 2),
        Config(32, 128, 256, 3),
        Config(32, 128, 256, 2),
        Config(64, 64, 128, 2),
        Config(32, 64, 128, 2),
        Config(32, 64, 256, 1),
    ),
    WGMMA,
    # Heads of 256 on an H200: twice as fast as 32 x 64 for both, of 1 to 2 % between these and others that fit.
    dv=(Config(64, 128, 256, 2), Config(32, 128, 256, 2), Config(32, 128, 256, 1)),
    dk=(Config(32, 128, 256, 2), Config(32, 128, 256, 1), Config(16, 128, 256, 1)),
)
WIDE_KEYS = 128  # keys of a block below which dk and dv are better made apart: those of two warpgroups of wgmma
WIDE_HEAD = 128  # columns of a head above which blocks of keys by mma.sync hold most of their registers in sums
# Two blocks of keys on a multiprocessor, for narrow heads.
SHARING = Config(64, 64, 128, 2, blocks=2)
HALVES = _Candidates(
    (Config(64, 32, 128, 2), Config(64, 32, 256, 1), Config(32, 16, 128, 1), Config(16, 16, 128, 1)),
    (Config(32, 64, 128, 2), Config(32, 64, 256, 1), Config(16, 32, 128, 1), Config(16, 16, 128, 1)),
    MMA_SYNC,
)
WIDE = _Candidates(
    tuple(replace(tiling, shared_probs=True) for tiling in HALVES.dq),
    tuple(replace(tiling, shared_probs=True) for tiling in HALVES.dkv),
    WIDE_NUMBERS,
)


def _fits(config: Config, spec: Spec, machine: Machine, outputs: Sequence[str], budget: _Budget) -> bool:
    """Return whether a block's sums and tiles fit in registers and shared memory."""
    size, own, step = spec.dtype.itemsize, *_sides(config, outputs)
    if _is_bulk(spec, machine) and own % WGMMA_ROWS == 0:
        budget = WGMMA
    scores = 2 if outputs == ("dv",) else 3
    held = own * (step * scores + _columns(spec, outputs)) - (own * step if config.shared_probs else 0)
    wide = max(1, size // 4)
    held += own * step * (len(spec.slopes) - 1) if "dq" in outputs else 0
    if held * wide // config.threads > budget.room(spec, outputs):
        return False
    return footprint(replace(config, tiled=True), spec, outputs, _is_bulk(spec, machine)).fits(machine.target)


def _sides(config: Config, outputs: Sequence[str]) -> tuple[int, int]:
    """Return the rows of a block, and the rows of one step of its loop."""
    return (config.block_q, config.block_kv) if "dq" in outputs else (config.block_kv, config.block_q)


def _columns(spec: Spec, outputs: Sequence[str]) -> int:
    """Return the number of columns of all accumulators of a block."""
    return sum(spec.tile_dv if name == "dv" else spec.tile_d for name in outputs)


def _is_bulk(spec: Spec, machine: Machine) -> bool:
    """Return whether bulk copies fill the tiles that wgmma multiplies."""
    return machine.target.has_wgmma and spec.dtype.itemsize == 2


WGMMA_ROWS = 64  # of a warpgroup's products by wgmma
MMA_ROWS = 16  # of a warp's products by mma.sync


def footprint(config: Config, spec: Spec, outputs: Sequence[str], bulk: bool) -> Footprint:
    """Compute the shared memory of a block: own tiles, tiles of each step, exchanged weights and staged results."""
    own, step = _sides(config, outputs)
    both, bits = (spec.tile_d, spec.tile_dv), 8 * spec.dtype.itemsize
    tiles = [Tile(own, n, bits, parts=(Part.BEFORE, Part.LOOP)) for n in (both[:1] if outputs == ("dv",) else both)]
    tiles += [Tile(step, columns, bits, config.stages, (Part.LOOP,)) for columns in both]
    if "dq" not in outputs:  # the statistics of rows
        tiles.append(
            Tile(spec.row_statistics, step, 8 * compute_dtype(spec.dtype).itemsize, config.stages, (Part.LOOP,))
        )
    if config.shared_probs:
        tiles += [Tile(own, step, bits, parts=(Part.LOOP,))] * len(outputs)
    elif not bulk and own < MMA_ROWS * config.threads // 32:  # scores and their gradients, of warps that share rows
        tiles += [Tile(own, step, 32, parts=(Part.LOOP,))] * (1 if outputs == ("dv",) else 2)
    if config.staged:
        columns = [spec.tile_dv if name == "dv" else spec.tile_d for name in outputs]
        columns = [max(columns)] if spec.layout.ragged else columns  # threads store ragged rows, one result at a time
        tiles += [Tile(own, n, bits, parts=(Part.LEAVING,)) for n in columns]
    return Footprint((*tiles, *spec.operand_tiles(config)), bulk)


def _finished(config: Config, spec: Spec, machine: Machine, outputs: Sequence[str], heads: int) -> Config:
    """Complete a tiling with launch-dependent options: block order, head grouping and staged stores. Heavy blocks run
    first. Few heads run side by side, so that the data that their blocks share stays in the second-level cache. Results
    pass through shared memory, where the operand tiles leave room and one kernel makes dk and dv.
    """
    side = side_by_side(heads)
    # Numbers of 4 bytes that are read across rows take registers. Only products by wgmma leave room for them.
    narrow = "dq" in outputs or machine.target.has_wgmma or all(x.stored.itemsize < 4 for x in spec.operands)
    tiled = narrow and any(x.tiled for x in spec.operands)
    whole = footprint(replace(config, staged=True, tiled=True), spec, outputs, _is_bulk(spec, machine))
    room = not tiled or whole.fits(machine.target)
    # By mma.sync, sums of wide heads and the loop over heads that share keys leave no registers for staged stores.
    crowded = spec.grouped and not machine.target.has_wgmma and max(spec.tile_d, spec.tile_dv) > WIDE_HEAD
    staged = spec.dtype.itemsize == 2 and room and outputs not in (("dk",), ("dv",))
    staged = staged and (not crowded or "dq" in outputs)
    return replace(config, packed=False, heavy_first=spec.causal, side=side, staged=staged, tiled=tiled)


# The kernels of attention's gradients: blocks of queries sum up dq, blocks of keys dk and dv.

# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
FAST = {"tl.enable_fast_math": True}


@T.macro
def store_scaled(
    config: Config, layout: Layout, acc: Any, factor: Any, target: Any, place: tuple[Any, ...], span: Span
) -> None:
    """Store sums times a factor as the rows of a span."""
    factors = T.alloc_fragment((acc.shape[0],), acc.dtype)
    T.fill(factors, factor)
    if layout.ragged:
        store_own(acc, factors, target, place, span, config.staged)
    else:
        (store_staged if config.staged else store_rows)(acc, factors, target, place, span.row)


INEXACT = 1e-4  # distance of a sum of probabilities from 1 from which stored gradients of scores are corrected


@library_jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def query_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel that computes dq of a block of queries.

    It also stores the gradient of each visible score if asked. For `key_gradients` it stores numbers of each query, in
    rows of whole blocks. The first number is the argument of `probability`, infinite for a query that sees no key. The
    second is the sum of grad * out, a common term of all gradients of a query's probabilities.

    With finite masks there is a third, by which probabilities are multiplied so that their sum is 1. As low as numbers
    go, a log-sum-exp has no digit left for the count of a query's keys.
    """
    rows, keys = config.block_q, config.block_kv
    accum = compute_dtype(spec.dtype)
    alloc_probs = T.alloc_shared if config.shared_probs else T.alloc_fragment
    infinity = T.infinity(accum)
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1
    d, dv = (spec.tile_d, spec.tile_dv) if spec.exact else (dynamic("d", spec.vector), dynamic("dv", spec.vector))
    q_shape = (batch, kv_heads, groups, q_len)
    layout, sequences = spec.layout, batch if spec.layout.fixed else T.dynamic("sequences")
    operand_types = spec.operand_types(sequences, q_shape[1:3], q_shape[3], kv_len)
    lists = spec.lists
    list_types = [] if lists is None else lists.types(batch, kv_heads * groups)
    layout_types = layout.types(sequences)
    behind = len(layout_types) + len(list_types)
    kept_types = [T.Tensor((*q_shape, kv_len), spec.dtype)] * len(spec.keep)
    slopes = spec.slopes

    @T.prim_func
    def query_gradients(
        q: strided("q", (*q_shape, d), spec.dtype, multiple=spec.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), spec.dtype, multiple=spec.vector),
        *operands: [*operand_types, *kept_types, *layout_types, *list_types],
        grad: strided("grad", (*q_shape, dv), spec.dtype, multiple=spec.vector),
        out: strided("out", (*q_shape, dv), spec.dtype, multiple=spec.vector),
        lse: T.Tensor(q_shape, accum),
        dq: strided("dq", (*q_shape, d), spec.dtype, multiple=spec.vector),
        statistics: T.Tensor((*q_shape[:3], spec.row_statistics, padded), accum),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
    ):
        given = Given(layout, operands[len(operands) - behind : len(operands) - len(list_types)])
        if layout.ragged:
            plan(given.q_ends, given.tiles, q_len, rows)
        blocks = given.tiles.shape[0] if layout.ragged else padded // rows
        with T.Kernel(*config.grid(blocks, kv_heads * groups, batch, 1), threads=config.threads) as (bx, by, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            block, any_head, sequence, _ = config.place(bx, by, bz, blocks, kv_heads * groups, 1)
            head, member = any_head // groups, any_head % groups
            if layout.ragged:
                span = given.ragged_span(block, q_len, kv_len, of_keys=False)
            else:
                span = dense_span(block * rows, sequence, q_len, q_len, kv_len, q_offset)
            here = (span.slab, head, member)
            q_tile = T.alloc_shared((rows, spec.tile_d), spec.dtype)
            grad_tile = T.alloc_shared((rows, spec.tile_dv), spec.dtype)
            k_tile = T.alloc_shared((keys, spec.tile_d), spec.dtype)
            v_tile = T.alloc_shared((keys, spec.tile_dv), spec.dtype)
            queries = Rows(
                span.first, span.length, span.queries, False, span.sequence, head, member, groups, span.q_offset
            )
            held = prepare_operands(spec.operands, operands[: len(operand_types)], (rows, keys), config.tiled, queries)
            common = T.alloc_fragment((rows,), accum)
            row_lse = T.alloc_fragment((rows,), accum)

            T.copy(grad[(*here, span.row, 0)], grad_tile)
            product = T.alloc_fragment((rows, spec.tile_dv), accum)
            for i, c in T.Parallel(rows, spec.tile_dv):
                product[i, c] = T.cast(grad_tile[i, c], accum) * T.cast(out[(*here, span.row + i, c)], accum)
            T.reduce_sum(product, common, dim=1)
            for i in T.Parallel(rows):
                log_sum = lse[(*here, span.row + i)]
                row_lse[i] = T.if_then_else(
                    log_sum == -infinity, infinity, log_sum if spec.finite_min_masks else log_sum * LOG2_E
                )
                if layout.ragged:
                    is_own = span.first + i < span.length
                    row_lse[i] = T.if_then_else(is_own, row_lse[i], infinity)
                    common[i] = T.if_then_else(is_own, common[i], 0.0)
            T.copy(row_lse, statistics[(*here, 0, _own_statistics(layout, span))])
            T.copy(common, statistics[(*here, 1, _own_statistics(layout, span))])

            T.copy(q[(*here, span.row, 0)], q_tile)
            p = T.alloc_fragment((rows, keys), accum)
            dp = T.alloc_fragment((rows, keys), accum)
            ds = alloc_probs((rows, keys), spec.dtype)
            # For each slope the probabilities times it, and later the gradients: the first are those of products.
            probs = [p, *[T.alloc_fragment((rows, keys), accum) for _ in slopes[1:]]]
            grads = [ds, *[T.alloc_fragment((rows, keys), spec.dtype) for _ in slopes[1:]]]
            acc = T.alloc_fragment((rows, spec.tile_d), accum)
            T.clear(acc)
            # The probabilities themselves, where they are summed and are not the first of `probs`.
            apart = [T.alloc_fragment((rows, keys), accum)] if spec.finite_min_masks and slopes != [1.0] else []
            if spec.finite_min_masks:
                share = T.alloc_fragment((rows,), accum)
                T.clear(share)
            kept = operands[len(operand_types) : len(operands) - behind]
            extremes = (span.first, T.min(span.first + rows - 1, span.length - 1))
            listed = None
            if lists is not None:
                counts, indices = operands[len(operands) - 2], operands[len(operands) - 1]
                own_list = lists.place(span.sequence, any_head, span.first, counts)
                listed = lists.steps(counts, own_list, keys)
            first, end = spec.key_blocks(config, extremes, span.q_offset, window, span.keys, 1, 0, listed)
            for iteration in T.Pipelined(end - first, num_stages=config.stages):
                step = end - 1 - iteration if spec.backwards(config) else first + iteration
                if lists is not None:
                    step = lists.step(indices, own_list, step, keys, span.keys)
                load(held, queries, step * keys)
                load_keys(given, k, k_tile, span, head, step)
                T.gemm(q_tile, k_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                load_keys(given, v, v_tile, span, head, step)
                T.gemm(grad_tile, v_tile, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    chance, found = weigh(spec, p[i, j], scale, row_lse[i], held, queries, i, j, step * keys)
                    for probs_of, value in zip(probs, found, strict=True):
                        probs_of[i, j] = value
                    for chances in apart:
                        chances[i, j] = chance
                if spec.needs_mask(config, iteration, step, extremes, span.q_offset, window, span.keys):
                    tiles = [*probs, *([] if layout.fixed else [dp]), *apart]
                    limits = span.q_offset, window, span.keys
                    hide_keys(spec, tiles, 0.0, lambda i: span.first + i, step * keys, *limits)
                if spec.finite_min_masks:
                    T.reduce_sum(apart[0] if apart else p, share, dim=1, clear=False)
                for i, j in T.Parallel(rows, keys):
                    for probs_of, grad_of in zip(probs, grads, strict=True):
                        grad_of[i, j] = T.cast(probs_of[i, j] * (dp[i, j] - common[i]), spec.dtype)
                for name, all_grads in zip(spec.keep, kept, strict=True):
                    T.copy(grads[slopes.index(spec.slope(name))], all_grads[(*here, span.row, step * keys)])
                if layout.ragged:
                    clear_past(k_tile, step * keys, span.keys, iteration == 0 if spec.backwards(config) else True)
                T.gemm(ds, k_tile, acc, policy=T.GemmWarpPolicy.FullRow)

            if spec.finite_min_masks:
                for i in T.Parallel(rows):
                    share[i] = T.if_then_else(share[i] > 0, 1 / share[i], 0.0)
                T.copy(share, statistics[(*here, 2, _own_statistics(layout, span))])
                for i, c in T.Parallel(rows, spec.tile_d):
                    acc[i, c] *= share[i]
                for step in T.serial(first, end) if kept else ():
                    for i, j in T.Parallel(rows, keys):
                        if T.abs(share[i] - 1) > INEXACT:
                            for all_grads in kept:
                                place = (*here, span.row + i, step * keys + j)
                                all_grads[place] = T.cast(T.cast(all_grads[place], accum) * share[i], spec.dtype)
            store_scaled(config, layout, acc, scale, dq, here, span)

    return query_gradients


@library_jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def key_gradients(config: Config, spec: Spec, outputs: tuple[str, ...] = ("dk", "dv")) -> Any:
    """Build the kernel that computes dk, dv or both of a block of keys. It sums over all heads that share the keys.

    Tiles of scores have a row for each key, so that they are left operands in registers of both sums.
    """
    queries, rows = config.block_q, config.block_kv
    accum = compute_dtype(spec.dtype)
    alloc_probs = T.alloc_shared if config.shared_probs else T.alloc_fragment
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1
    d, dv = (spec.tile_d, spec.tile_dv) if spec.exact else (dynamic("d", spec.vector), dynamic("dv", spec.vector))
    q_shape = (batch, kv_heads, groups, q_len)
    layout, sequences = spec.layout, batch if spec.layout.fixed else T.dynamic("sequences")
    lists = spec.lists
    list_types = [] if lists is None else lists.types(batch, kv_heads * groups)
    layout_types = layout.types(sequences)
    behind = len(layout_types) + len(list_types)
    of_keys, of_values = "dk" in outputs, "dv" in outputs
    # dv is a sum of probabilities, dk of probabilities times slopes.
    separate = of_values and of_keys and spec.slopes != [1.0]

    @T.prim_func
    def key_gradients(
        q: strided("q", (*q_shape, d), spec.dtype, multiple=spec.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), spec.dtype, multiple=spec.vector),
        *operands: [*spec.operand_types(sequences, q_shape[1:3], q_shape[3], kv_len), *layout_types, *list_types],
        grad: strided("grad", (*q_shape, dv), spec.dtype, multiple=spec.vector),
        statistics: T.Tensor((*q_shape[:3], spec.row_statistics, padded), accum),
        dk: strided("dk", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        dv_out: strided("dv_out", (batch, kv_heads, kv_len, dv), spec.dtype, multiple=spec.vector),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
    ):
        given = Given(layout, operands[len(operands) - behind : len(operands) - len(list_types)])
        if layout.ragged:
            plan(given.k_ends, given.tiles, kv_len, rows)
        blocks = given.tiles.shape[0] if layout.ragged else T.ceildiv(kv_len, rows)
        with T.Kernel(*config.grid(blocks, kv_heads, batch, 1), threads=config.threads) as (bx, by, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            place, head, sequence, _ = config.place(bx, by, bz, blocks, kv_heads, 1)
            block = blocks - 1 - place if config.heavy_first else place  # the first keys are the heavy ones
            if layout.ragged:
                span = given.ragged_span(block, q_len, kv_len, of_keys=True)
                first_key = span.first
                first_number = statistics_row(span)
            else:
                first_key, first_number = block * rows, 0
                span = dense_span(first_key, sequence, kv_len, q_len, kv_len, q_offset)
            k_tile = T.alloc_shared((rows, spec.tile_d), spec.dtype)
            q_tile = T.alloc_shared((queries, spec.tile_d), spec.dtype)
            grad_tile = T.alloc_shared((queries, spec.tile_dv), spec.dtype)
            numbers = T.alloc_shared((spec.row_statistics, queries), accum)
            p = T.alloc_fragment((rows, queries), accum)
            T.copy(k[span.slab, head, span.row, 0], k_tile)
            if of_keys:
                v_tile = T.alloc_shared((rows, spec.tile_dv), spec.dtype)
                dp = T.alloc_fragment((rows, queries), accum)
                ds = alloc_probs((rows, queries), spec.dtype)
                dk_acc = T.alloc_fragment((rows, spec.tile_d), accum)
                T.copy(v[span.slab, head, span.row, 0], v_tile)
                T.clear(dk_acc)
            if of_values:
                p_rounded = alloc_probs((rows, queries), spec.dtype)
                dv_acc = T.alloc_fragment((rows, spec.tile_dv), accum)
                T.clear(dv_acc)
            held = prepare_operands(spec.operands, operands[: len(spec.operands)], (queries, rows), config.tiled, None)

            first, end = query_blocks(spec, config, first_key, span.q_offset, window, span.queries)
            for member in T.serial(groups) if spec.grouped else (0,):
                here = (span.slab, head, member)
                if lists is not None:
                    counts, indices = operands[len(operands) - 2], operands[len(operands) - 1]
                    own_list = lists.place(span.sequence, head * groups + member, first_key, counts)
                    begin, behind_last = 0, lists.steps(counts, own_list, queries)
                else:
                    begin, behind_last = first, end
                for iteration in T.Pipelined(behind_last - begin, num_stages=config.stages):
                    step = begin + iteration
                    if lists is not None:
                        step = lists.step(indices, own_list, step, queries, span.queries)
                    seers = Rows(
                        step * queries, span.queries, span.queries, False, span.sequence, head, member, groups,
                        span.q_offset,
                    )  # fmt: skip
                    load(held, seers, first_key)
                    T.copy(q[(*here, after(span.first_query, step * queries), 0)], q_tile)
                    T.gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.copy(grad[(*here, after(span.first_query, step * queries), 0)], grad_tile)
                    if of_keys:
                        T.gemm(
                            v_tile, grad_tile, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
                        )
                    T.copy(statistics[(*here, 0, after(first_number, step * queries))], numbers)
                    for i, j in T.Parallel(rows, queries):
                        chance, found = weigh(spec, p[i, j], scale, numbers[0, j], held, seers, j, i, first_key)
                        if spec.finite_min_masks:
                            chance, found = chance * numbers[2, j], [found[0] * numbers[2, j]]
                        if separate:
                            p_rounded[i, j] = T.cast(chance, spec.dtype)
                        p[i, j] = found[0] if of_keys else chance
                    if masks_queries(spec, config, step, first_key, span.q_offset, window, span.queries):
                        for i, j in T.Parallel(rows, queries):
                            seen = seen_by(
                                spec, first_key + i, step * queries, j, queries, span.q_offset, window, span.queries
                            )
                            p[i, j] = T.if_then_else(seen, p[i, j], 0.0)
                            if of_keys and layout.ragged:
                                dp[i, j] = T.if_then_else(seen, dp[i, j], 0.0)
                            if separate:
                                p_rounded[i, j] = T.if_then_else(seen, p_rounded[i, j], T.cast(0.0, spec.dtype))
                    if of_values and not separate:
                        T.copy(p, p_rounded)
                    if of_keys:
                        for i, j in T.Parallel(rows, queries):
                            ds[i, j] = T.cast(p[i, j] * (dp[i, j] - numbers[1, j]), spec.dtype)
                    if layout.ragged:
                        clear_past(grad_tile, step * queries, span.queries, of_values)
                        clear_past(q_tile, step * queries, span.queries, of_keys)
                    if of_values:
                        T.gemm(p_rounded, grad_tile, dv_acc, policy=T.GemmWarpPolicy.FullRow)
                    if of_keys:
                        T.gemm(ds, q_tile, dk_acc, policy=T.GemmWarpPolicy.FullRow)

            if of_values:
                store_scaled(config, layout, dv_acc, 1.0, dv_out, (span.slab, head), span)
            if of_keys:
                store_scaled(config, layout, dk_acc, scale, dk, (span.slab, head), span)

    return key_gradients
