# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 queries, keys and values with a scale for each head (FlashAttention-3, arXiv:2407.08608, 3.3).

Where tensor cores multiply float8, both products are of float8. Scores become codes of float8 weights without
exponentials. Codes are linear between powers of two (Schraudolph, "A fast, compact approximation of the exponential
function", Neural Computation 11, 1999). Columns of ones beside the values sum up the weights. These tensor cores read
values transposed. A kernel of its own transposes them. It puts each run of 16 keys in the order in which a thread holds
scores. So weights stay in registers. Elsewhere `forward` computes with widened operands, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention import forward
from torch_tile.kernels.attention.args import AttentionArgs, AttentionFp8Args, dense_args
from torch_tile.kernels.attention.arguments import bounded, empty_beside
from torch_tile.kernels.attention.forward import default_scale, store_rows, store_staged
from torch_tile.kernels.attention.softmax import base_of, begin_rows, factor_of, hide_keys
from torch_tile.kernels.attention.spec import Config, Spec, is_shifted
from torch_tile.kernels.attention.tiling import Problem
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
    vector_of,
)
from torch_tile.kernels.footprint import Footprint, Part, Tile
from torch_tile.kernels.library_jit import library_jit

GAIN = 8.0  # weights are kept times 2 ** GAIN: 256 is the largest power of two that float8_e4m3fn has
ONES = 8  # columns of ones behind the values: as many as a product's step of columns
ONE_BYTE = 0x38  # the code of 1
CODE_OF_LARGEST = 120  # of 2 ** GAIN; the NaN is 127
CODES = 8  # from one power of two to the next
# Codes are linear between powers of two, where exponentials are below: by 4 % in the mean. This makes the mean error 0.
CENTRE = 0.45
UNIT_OF_CODES = 2.0**-24  # of `T.float8_of_code`
REACH = 14  # powers of two from the largest weight of a block of keys to the least number with three digits
LARGE = 2.0**23  # exponents below are rounded by at most 0.5, and codes by 4
LEAST_FACTOR = 2.0**-100  # of scores: products of -inf by a number that is flushed to 0 are NaN
LARGEST = 448.0
SCALED = "v0=mul(acc0,x0);ret v0"
RUN = 16  # keys that are put in another order
EACH = 64  # keys of a block that transposes


def times(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return a float8 operand times the scales of its heads, in `dtype`."""
    return x.to(dtype) if scale is None else x.to(dtype) * scale.to(torch.float32).to(dtype)[..., None, None]


def widened(args: AttentionFp8Args[torch.Tensor], dtype: torch.dtype) -> AttentionArgs[torch.Tensor]:
    """Return the arguments of `attention` on operands times their scales, in `dtype`."""
    scales = args.q_scale, args.k_scale, args.v_scale
    q, k, v = (times(x, scale, dtype) for x, scale in zip(args[:3], scales, strict=True))
    return dense_args(q, k, v, args)


def empty_result(args: AttentionFp8Args[torch.Tensor]) -> torch.Tensor:
    """Return an empty result, of bfloat16 unless another dtype is asked for."""
    return empty_beside(args.q, args.v.shape[3], torch.bfloat16 if args.dtype is None else args.dtype)


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.attention_fp8` and lse `[B, H, Sq]` in float32 (float64 for that `dtype`).

    The kernels round weights to float8_e4m3fn where their target multiplies float8: to within 8 % of themselves, or
    2 ** -14 of the largest in a row's block of at most 224 keys.
    """
    args: AttentionFp8Args[torch.Tensor] = AttentionFp8Args(*given, **named)
    made = empty_result(args)
    out, lse = forward.reference(*widened(args, compute_dtype(made.dtype)))
    return made.copy_(out), lse


@dataclass(frozen=True)
class Fp8Spec:
    """Compile-time facts of the kernel besides its `Config`. `spec` says what a query sees.

    `out`: the dtype of the result, whose rows start at multiples of `out_multiple` elements. `scaled`: which of q, k
    and v have scales.
    """

    spec: Spec
    out: torch.dtype
    out_multiple: int
    scaled: tuple[bool, bool, bool]

    def scale(self, operand: int, scales: Sequence[Any], *place: Any) -> Any:
        """Return the scale of an operand's head: 1 unless it has scales."""
        return scales[sum(self.scaled[:operand])][place] if self.scaled[operand] else 1.0


@library_jit
def transpose_values(width: int, vector: int) -> Any:
    """Build the kernel that transposes the bytes of values `[B, H, S, Dv]`, with keys in the order of `key_at`.

    Rows behind the values hold `ONES` times 1.
    """
    batch, heads, length = T.dynamic("batch, heads, length")
    d, padded = dynamic("d", vector), dynamic("padded", EACH)

    @T.prim_func
    def transpose_values(
        v: strided("v", (batch, heads, length, d), torch.uint8, multiple=vector),
        transposed: T.Tensor((batch, heads, width + ONES, padded), torch.uint8),
    ):
        with T.Kernel(padded // EACH, heads, batch, threads=128) as (bx, head, sequence):
            T.pdl_trigger()
            # Rows that lie so that the threads of a warp, eight words of four rows each, meet all banks.
            tile = T.alloc_shared((EACH, width + 16), torch.uint8)
            columns = T.alloc_shared((width + ONES, EACH + 4), torch.uint8)
            words = math.gcd(width // 4, 8)
            T.copy(v[sequence, head, bx * EACH : (bx + 1) * EACH, 0:width], tile[0:EACH, 0:width])
            for run, group, word, c in T.Parallel(EACH // RUN, width // 4 // words, RUN // 4, words):
                square = T.alloc_local((4, 4), torch.uint8)
                place, column = run * RUN + word * 4, (group * words + c) * 4
                for byte in T.unroll(4):
                    for n in T.vectorized(4):
                        square[byte, n] = tile[key_at(place + byte), column + n]
                for n in T.unroll(4):
                    for byte in T.vectorized(4):
                        columns[column + n, place + byte] = square[byte, n]
            for i, j in T.Parallel(ONES, EACH):
                columns[width + i, j] = T.cast(ONE_BYTE, "uint8")
            T.copy(columns[0 : width + ONES, 0:EACH], transposed[sequence, head, 0, bx * EACH])

    return transpose_values


def key_at(place: Any) -> Any:
    """Return which key has a place in transposed values."""
    return place // RUN * RUN + place % RUN // 4 * 2 + place % 4 // 2 * 8 + place % 2


@T.macro
def encode_weights(
    scores: Any, row_max: Any, base: Any, rescale: Any, probs: Any, scale_log2: Any, all_exact: Any
) -> None:
    """Round weights `2 ** (GAIN + scale_log2 * score - base)` to float8 `probs`, in the order of `key_at`.

    Only bytes of codes are gathered behind the product that reads `probs` of the block before.

    `row_max`, `base` and `rescale` `[rows]` are those of `exponentiate`, with one difference. `base` follows the
    largest score of this block, down to `REACH` below that of the row. So small weights of other blocks keep their
    digits. A score's exponent is at most 0.5 off where it is large, all weights of a row alike. With `all_exact` no
    score is that large. Otherwise a large maximum is taken off first.
    """
    rows, keys = scores.shape
    step_max, slope, shift, taken = (T.alloc_fragment((rows,), "float32") for _ in range(4))
    codes = T.alloc_fragment((rows, keys), "float16")  # times UNIT_OF_CODES
    T.reduce_max(scores, step_max, dim=1, nan_propagate=True)
    for i in T.Parallel(rows):
        row_max[i] = T.max(row_max[i], step_max[i])
        factor = factor_of(row_max[i], scale_log2, LARGE)
        new_base = T.max(base_of(step_max[i], factor), base_of(row_max[i], factor) - REACH)
        rescale[i] = T.exp2(base[i] - new_base)
        base[i] = new_base
        is_large = T.abs(row_max[i] * scale_log2) >= LARGE
        taken[i] = T.if_then_else(is_large, T.max(step_max[i], T.min_value("float32")), 0.0)
        slope[i] = factor * (CODES * UNIT_OF_CODES)
        first = (CODE_OF_LARGEST - CENTRE) / CODES - (new_base - taken[i] * factor)
        shift[i] = first * (CODES * UNIT_OF_CODES)
    if T.logical_not(all_exact):
        for i, j in T.Parallel(rows, keys):
            scores[i, j] = scores[i, j] - taken[i]
    for i, j in T.Parallel(rows, keys):
        codes[i, j] = T.cast(T.positive_half(T.fma(scores[i, j], slope[i], shift[i])), "float16")
    # Of 16 columns thread t holds 2t, 2t + 1, 2t + 8, 2t + 9 of a result. Of an operand it holds 4t to 4t + 3.
    for i, run, t, byte in T.Parallel(rows, keys // RUN, 4, 4):
        probs[i, run * RUN + t * 4 + byte] = T.cast(
            T.float8_of_code(codes[i, run * RUN + byte // 2 * 8 + t * 2 + byte % 2]), probs.dtype
        )


# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def flash_attention_fp8(config: Config, form: Fp8Spec) -> Any:
    """Build the forward kernel: online softmax over blocks of keys, as `forward.flash_attention` has it.

    Values are given as `transpose_values` makes them.
    """
    spec, rows, keys = form.spec, config.block_q, config.block_kv
    columns = spec.tile_dv + ONES
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    groups = T.dynamic("groups") if spec.grouped else 1
    d, dv = (spec.tile_d, spec.tile_dv) if spec.exact else (dynamic("d", spec.vector), dynamic("dv", spec.vector))
    heads = kv_heads * groups
    v_shape = batch, kv_heads, columns, dynamic("padded", EACH)
    infinity = T.infinity("float32")
    scale_types = [
        strided(f"{name}_scale", (batch, count), torch.float32, unit=False, align=4)
        for name, count, given in zip("qkv", (heads, kv_heads, kv_heads), form.scaled, strict=True)
        if given
    ]

    @T.prim_func
    def attention_fp8(
        q: strided("q", (batch, heads, q_len, d), spec.dtype, multiple=spec.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        v: strided("v", v_shape, spec.dtype, multiple=RUN),
        *scales: scale_types,
        lse: T.Tensor((batch, heads, q_len), "float32"),
        out: strided("out", (batch, heads, q_len, dv), form.out, multiple=form.out_multiple),
        scale: T.float32,
        q_offset: T.int32,
        window: T.int32,
    ):
        blocks = T.ceildiv(q_len, rows)
        with T.Kernel(*config.grid(blocks, heads, batch, 1), threads=config.threads) as (bx, by, bz):
            T.pdl_sync()
            block, head, sequence, _ = config.place(bx, by, bz, blocks, heads, 1)
            kv_head, first_row = head // groups, block * rows
            q_tile = T.alloc_shared((rows, spec.tile_d), spec.dtype)
            k_tile = T.alloc_shared((keys, spec.tile_d), spec.dtype)
            v_tile = T.alloc_shared((columns, keys), spec.dtype)
            scores = T.alloc_fragment((rows, keys), "float32")
            probs = T.alloc_fragment((rows, keys), spec.dtype)
            acc, part = (T.alloc_fragment((rows, columns), "float32") for _ in range(2))
            row_max, base, row_sum, rescale, late = (T.alloc_fragment((rows,), "float32") for _ in range(5))
            T.copy(q[sequence, head, first_row, 0], q_tile)
            T.clear(acc)
            T.clear(part)
            T.fill(late, 1.0)
            begin_rows(row_max, base)
            factor = scale * form.scale(0, scales, sequence, head) * form.scale(1, scales, sequence, kv_head)
            # Scores are kept unscaled where that turns none of them around.
            unit = T.if_then_else(factor > 0.0, factor, 1.0)
            scale_log2 = T.max(unit * LOG2_E, LEAST_FACTOR)
            all_exact = T.abs(factor) * (LOG2_E * LARGEST**2 * spec.tile_d) < LARGE
            extremes = first_row, T.min(first_row + rows - 1, q_len - 1)
            first, end = spec.key_blocks(config, extremes, q_offset, window, kv_len, 1, 0)
            for iteration in T.Pipelined(end - first, num_stages=config.stages):
                step = end - 1 - iteration if spec.backwards(config) else first + iteration
                T.copy(k[sequence, kv_head, step * keys, 0], k_tile)
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                if T.logical_not(factor > 0.0):
                    for i, j in T.Parallel(rows, keys):
                        scores[i, j] = scores[i, j] * factor
                if spec.needs_mask(config, iteration, step, extremes, q_offset, window, kv_len):
                    limits = q_offset, window, kv_len
                    hide_keys(
                        spec, [scores], -infinity, lambda i: T.min(first_row + i, q_len - 1), step * keys, *limits
                    )
                encode_weights(scores, row_max, base, rescale, probs, scale_log2, all_exact)
                T.copy(v[sequence, kv_head, 0, step * keys], v_tile)
                # Tensor cores cut off digits of float8 products' sums: up to a third of the sum of 16384 weights.
                # So a product has the sums of one block, which are added up here, while the next scores are made.
                for i, c in T.Parallel(rows, columns):
                    acc[i, c] = T.fma(acc[i, c], late[i], part[i, c])
                T.copy(rescale, late)
                T.gemm(probs, v_tile, part, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            for i, c in T.Parallel(rows, columns):
                acc[i, c] = T.fma(acc[i, c], late[i], part[i, c])
            result, sums = (T.alloc_fragment((rows, width), "float32") for width in (spec.tile_dv, ONES))
            T.copy(acc[0:rows, 0 : spec.tile_dv], result)
            T.copy(acc[0:rows, spec.tile_dv : columns], sums)
            T.reduce_max(sums, row_sum, dim=1, nan_propagate=True)  # all are equal
            for i in T.Parallel(rows):
                if first_row + i < q_len:
                    lag = base[i] - base_of(row_max[i], factor_of(row_max[i], scale_log2, LARGE))
                    rest = T.log(row_sum[i]) + (lag - GAIN) * math.log(2)
                    lse[sequence, head, first_row + i] = row_max[i] * unit + rest
                own = T.if_then_else(row_sum[i] == 0.0, 0.0, 1.0 / row_sum[i])
                rescale[i] = own * form.scale(2, scales, sequence, kv_head)
            (store_staged if config.staged else store_rows)(result, rescale, out, (sequence, head), first_row)

    return attention_fp8


@entry_function(
    AttentionFp8Args,
    reference,
    lambda args: (made := empty_result(args), args.q.new_empty(args.q.shape[:3], dtype=compute_dtype(made.dtype))),
)
def attention_fp8(
    args: AttentionFp8Args[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute attention as `reference` does, within the rounding that it names. `config` overrides the tiling."""
    able = args.q.numel() and args.v.numel() and out.dtype != torch.float64
    return bool(able) and _run(args, out, lse, machine_of(args.q), config)


def _run(
    args: AttentionFp8Args[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, machine: Machine, config: Config | None
) -> bool:
    """Launch the kernels, those of `forward` if float8 has no tiling. Return whether there is one."""
    q, k, v = (dense_last(x) for x in args[:3])
    batch, kv_heads, kv_len, head_dim = k.shape
    heads, v_dim = q.shape[1], v.shape[3]
    tile_d, tile_dv = round_up(head_dim, 32), round_up(v_dim, 16)
    exact = (tile_d, tile_dv) == (head_dim, v_dim)
    vector = vector_of((q, k, v), (head_dim, v_dim)) if machine.is_gpu else 1
    spec = Spec(
        q.dtype, tile_d, tile_dv, exact, args.causal, args.window > 0, None, heads > kv_heads, True, vector,
        shifted=is_shifted(args.causal, args.window, args.q_offset),
    )  # fmt: skip
    config = config or config_for(spec, Problem(batch * heads, q.shape[2], kv_len), machine, out.element_size())
    if config is None:
        return _run_widened(args, out, lse, machine)
    given = ((args.q_scale, q), (args.k_scale, k), (args.v_scale, k))
    scales = [scale.to(torch.float32).expand(x.shape[:2]) for scale, x in given if scale is not None]
    scaled = args.q_scale is not None, args.k_scale is not None, args.v_scale is not None
    form = Fp8Spec(spec, out.dtype, math.gcd(v_dim, 16), scaled)
    stored = v.new_empty((batch, kv_heads, tile_dv + ONES, -(-kv_len // EACH) * EACH))
    machine.kernel(transpose_values)(tile_dv, vector)(v.view(torch.uint8), stored.view(torch.uint8))
    number = float(default_scale(head_dim) if args.scale is None else args.scale)
    options = (number, args.q_offset, bounded(args.window))
    machine.kernel(flash_attention_fp8)(config, form)(q, k, stored, *scales, lse, out, *options)
    return True


def _run_widened(args: AttentionFp8Args[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, machine: Machine) -> bool:
    """Launch the kernels of `forward` for operands of float16, or of float32 on a CPU. Return whether it has a tiling.

    Scales are factors of scores and of results, since float16 would round operands times their scales.
    """
    dtype = torch.float16 if machine.is_gpu else torch.float32  # both hold all numbers of float8
    of_scores = [of_heads(scale, args) for scale in (args.q_scale, args.k_scale) if scale is not None]
    wide = widened(args._replace(q_scale=None, k_scale=None, v_scale=None), dtype)
    if of_scores:
        wide = wide._replace(aux=[math.prod(of_scores[1:], start=of_scores[0])], score=SCALED)
    direct = args.v_scale is None and out.dtype == dtype
    made = out if direct else empty_beside(args.q, args.v.shape[3], dtype)
    if not forward.run(wide, made, lse, machine, None, 0):
        return False
    if not direct:
        torch.mul(made, 1.0 if args.v_scale is None else of_heads(args.v_scale, args), out=out)
    return True


def of_heads(scale: torch.Tensor, args: AttentionFp8Args[torch.Tensor]) -> torch.Tensor:
    """Return the scales of an operand as float32 `[B or 1, H or 1, 1, 1]`, one for each head of queries."""
    heads = args.q.shape[1]
    each = heads // scale.shape[1] if 1 < scale.shape[1] < heads else 1
    return scale.to(torch.float32).repeat_interleave(each, 1)[..., None, None]


def _candidates(*tilings: tuple[int, int, int, int]) -> tuple[Config, ...]:
    """Make candidates of tilings by queries and keys of a block, threads and stages."""
    return tuple(Config(*tiling, packed=False) for tiling in tilings)


# Tilings by falling size; the first that fits is taken.
HOPPER = _candidates((128, 128, 256, 2), (128, 64, 256, 2), (64, 64, 128, 2), (64, 32, 128, 1))
OTHERS = _candidates((64, 64, 128, 2), (64, 32, 128, 2), (64, 32, 128, 1))
# Measured to be faster from LONG_KEYS keys on.
WIDE_KEY_BLOCKS = _candidates((128, 224, 256, 2), (128, 160, 256, 2))
WIDEST_VALUES = 128  # two tiles of sums of wider ones leave registers for few keys, and `forward` is faster
# Registers of a thread that its sums, scores and weights may take. Beside a producer, a thread has 240.
HELD, HELD_BESIDE_PRODUCER = 160, 216
LONG_KEYS = 4096


def config_for(spec: Spec, problem: Problem, machine: Machine, out_bytes: int) -> Config | None:
    """Choose the tiling of a problem on a machine, or None.

    None if the machine does not multiply float8, or no tiling of `flash_attention_fp8` fits.
    """
    multiplies = machine.is_gpu and machine.target.has_fp8 and spec.tile_dv <= WIDEST_VALUES
    return _config_for(spec, typical(problem), machine, out_bytes) if multiplies else None


@lru_cache(KEPT_CHOICES)
def _config_for(spec: Spec, problem: Problem, machine: Machine, out_bytes: int) -> Config | None:
    """Choose the first tiling that fits."""
    wgmma = machine.target.has_wgmma and spec.vector > 1
    candidates = OTHERS
    if wgmma:
        candidates = tuple(c for c in HOPPER if problem.rows > 64 or c.block_q == 64)
        if problem.rows > 64 and problem.keys >= LONG_KEYS:
            candidates = WIDE_KEY_BLOCKS + candidates
    staged, heavy_first = out_bytes == 2, spec.causal
    candidates = tuple(replace(c, staged=staged, heavy_first=heavy_first) for c in candidates)
    return next((c for c in candidates if _fits(c, spec, machine, wgmma)), None)


def _fits(config: Config, spec: Spec, machine: Machine, bulk: bool) -> bool:
    """Return whether a block's sums and tiles fit in registers and shared memory."""
    rows, keys, columns = config.block_q, config.block_kv, spec.tile_dv + ONES
    held = rows * (keys + keys // 4 + 2 * columns) // config.threads
    tiles = [Tile(rows, spec.tile_d, 8, parts=(Part.BEFORE, Part.LOOP))]
    tiles += [Tile(keys, spec.tile_d, 8, config.stages, (Part.LOOP,))]
    tiles += [Tile(columns, keys, 8, config.stages, (Part.LOOP,))]
    tiles += [Tile(rows, spec.tile_dv, 16, parts=(Part.LEAVING,))] if config.staged else []
    return held <= (HELD_BESIDE_PRODUCER if bulk else HELD) and Footprint(tuple(tiles), bulk).fits(machine.target)
