# SPDX-License-Identifier: Apache-2.0
"""`tile.mla_decode_fp8` and `tile.mla_sparse`: latent attention over a cache of float8, and over lists of positions."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.mla.args import MlaDecodeFp8Args, MlaSparseArgs
from torch_tile.ops import checks
from torch_tile.ops.attention_common import check_pages
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.families.mla_decode import check_parts
from torch_tile.ops.recomputed import by_autograd, no_gradient
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape, documented, in_torch
from torch_tile.ops.sharding_rule import Rule, Spec, if_given

FP8, SPARSE = "mla_decode_fp8", "mla_sparse"
GROUP = 128  # columns of a latent that share a scale


def _check_queries(op: str, args: MlaDecodeFp8Args[Tensor] | MlaSparseArgs[Tensor]) -> None:
    """Check queries, tables and lists."""
    q, q_pe = args.q, args.q_pe
    checks.check_floating(op, q=q, q_pe=q_pe)
    checks.check_same_dtype(op, q=q, q_pe=q_pe)
    check_parts(op, q, q_pe, (args.kv, args.k_pe) if isinstance(args, MlaSparseArgs) else ())
    checks.check_sizes(op, "q_pe", q_pe, q.shape[:3], "as q")
    for name, x, dims, meaning in (
        ("block_table", args.block_table, 2, "[B, n]"),
        ("seq_lens", args.seq_lens, 1, "[B]"),
        ("indices", args.indices, 3, "[B, Sq, n]"),
    ):
        if x is not None:
            checks.check_positions(op, name, x, dims, meaning, q=q)
            checks.check_size(op, name, x, 0, q.shape[0], "q's batch")
    if args.indices is not None:
        checks.check_size(op, "indices", args.indices, 1, q.shape[1], "q's length")
    require_value(
        args.num_splits >= 0, lambda: f"tile.{op}: num_splits is {args.num_splits}; expected 0 (automatic) or more"
    )


def _check_places(cache: Tensor) -> None:
    """Check where the positions of a cache lie; views of equal strides may begin elsewhere."""
    # The stride of a single page or position means nothing.
    steps = [step for step, n in zip(cache.stride()[:2], cache.shape[:2], strict=True) if not checks.known_one(n)]
    require(
        cache.stride(2) == 1 and all(n % 4 == 0 for n in (*steps, cache.storage_offset())),
        lambda: (
            f"tile.{FP8}: cache has strides {list(cache.stride())} and begins at byte {cache.storage_offset()} of its "
            "storage; expected dense positions at multiples of 4 bytes"
        ),
    )


def _check_fp8_values(args: MlaDecodeFp8Args[Tensor]) -> None:
    """Check what differs between calls of one form."""
    _check_places(args.cache)
    _check_values(FP8, args.cache, args)


def _fake_fp8(args: MlaDecodeFp8Args[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.mla_decode_fp8` and make its empty results."""
    _check_queries(FP8, args)
    q, cache, latent = args.q, args.cache, args.q.shape[3]
    require_type(cache.dtype == torch.uint8, lambda: f"tile.{FP8}: cache has dtype {cache.dtype}; expected torch.uint8")
    checks.check_device(FP8, "cache", cache, "q", q)
    shape = "[B, S, bytes]" if args.block_table is None else "[pages, page, bytes]"
    checks.check_dims(FP8, "cache", cache, 3, shape)
    require(latent % GROUP == 0, lambda: f"tile.{FP8}: q has {latent} columns; expected a multiple of {GROUP}")
    wanted = kernels("mla.packed").bytes_of(latent, args.q_pe.shape[3])
    checks.check_size(FP8, "cache", cache, 2, wanted, "the bytes of C float8, C / 128 float32 and R bfloat16")
    _check_places(cache)
    if args.block_table is None:
        checks.check_size(FP8, "cache", cache, 0, q.shape[0], "q's batch")
    return _results(q)


def _fake_sparse(args: MlaSparseArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.mla_sparse` and make its empty results."""
    _check_queries(SPARSE, args)
    q, q_pe, kv, k_pe = args[:4]
    checks.check_floating(SPARSE, q=q, kv=kv, k_pe=k_pe)
    checks.check_same_dtype(SPARSE, q=q, kv=kv, k_pe=k_pe)
    shape = "[B, S, {}]" if args.block_table is None else "[pages, page, {}]"
    checks.check_dims(SPARSE, "kv", kv, 3, shape.format("C"))
    checks.check_dims(SPARSE, "k_pe", k_pe, 3, shape.format("R"))
    checks.check_size(SPARSE, "kv", kv, 2, q.shape[3], "q's last dimension")
    checks.check_size(SPARSE, "k_pe", k_pe, 2, q_pe.shape[3], "q_pe's last dimension")
    checks.check_sizes(SPARSE, "k_pe", k_pe, kv.shape[:2], "as kv")
    if args.block_table is None:
        checks.check_size(SPARSE, "kv", kv, 0, q.shape[0], "q's batch")
    return _results(q)


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Make empty results."""
    return empty_beside(q, q.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _check_values(op: str, cache: Tensor, args: Any) -> None:
    """Check that lengths fit the cache and that their pages exist."""
    check_pages(op, cache.shape[:2], ("block_table", args.block_table), ("seq_lens", args.seq_lens))


def _sharding_of_fp8(args: MlaDecodeFp8Args[Spec]) -> Rule:
    """Name the dimensions of `tile.mla_decode_fp8` for sharding."""
    pages = "batch" if args.block_table is None else "page"
    return Rule(
        outputs=[("batch", "query", "head", "c"), ("batch", "query", "head")],
        inputs=[
            ("batch", "query", "head", "c"),
            ("batch", "query", "head", "r"),
            (pages, "key", "byte"),
            if_given(args.block_table, ("batch", "entry")),
            if_given(args.seq_lens, ("batch",)),
            if_given(args.indices, ("batch", "query", "n")),
        ],
        free=("batch", "head"),
    )


def _sharding_of_sparse(args: MlaSparseArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.mla_sparse` for sharding."""
    pages = "batch" if args.block_table is None else "page"
    inputs = [
        ("batch", "query", "head", "c"),
        ("batch", "query", "head", "r"),
        (pages, "key", "c"),
        (pages, "key", "r"),
        ("batch", "query", "n"),
        if_given(args.block_table, ("batch", "entry")),
        if_given(args.seq_lens, ("batch",)),
    ]
    return Rule(
        outputs=[("batch", "query", "head", "c"), ("batch", "query", "head")],
        inputs=inputs,
        saved=inputs,
        free=("batch", "head"),
    )


def _flops_of_fp8(args: MlaDecodeFp8Args[Shape]) -> int:
    """Count the operations of `tile.mla_decode_fp8`."""
    keys = args.cache[1] if args.block_table is None else args.block_table[1] * args.cache[1]
    return _products(args.q, args.q_pe, keys if args.indices is None else args.indices[2])


def _flops_of_sparse(args: MlaSparseArgs[Shape]) -> int:
    """Count the operations of `tile.mla_sparse`."""
    return _products(args.q, args.q_pe, args.indices[2])


def _products(q: Shape, q_pe: Shape, keys: int) -> int:
    """Count the operations of products over so many positions for each query."""
    batch, q_len, heads, latent = q
    return 2 * batch * q_len * heads * keys * (2 * latent + q_pe[3])


mla_decode_fp8: Final = declare(
    FP8,
    MlaDecodeFp8Args[Tensor],
    tuple[Tensor, Tensor],
    """`mla_decode_lse` over a latent cache of float8 in FlashMLA's layout, dense or over lists of positions.

A position is C numbers of float8_e4m3fn, C / 128 float32 scales of runs of 128 of them, and R numbers of bfloat16, the
rotary part: 656 bytes for DeepSeek-V3's C of 512 and R of 64. `pack_latents` makes them. A latent is `values * scales`,
rounded once to q's dtype.

Args:
    q: `[B, Sq, H, C]`: queries in the latent space; C is a multiple of 128.
    q_pe: `[B, Sq, H, R]`: their rotary part.
    cache: uint8 `[B, S, bytes]`, or `[pages, page, bytes]` with a block_table; bytes is C + C / 32 + 2 R.
    block_table: as in `mla_decode`.
    seq_lens: as in `mla_decode`.
    indices: int32 `[B, Sq, n]`: the positions of its sequence that each query sees, as in `mla_sparse`. Default: all
        up to its own.
    scale: default `(C + R) ** -0.5`; pass a model's own.
    num_splits: as in `mla_decode`.

Returns:
    out `[B, Sq, H, C]` in q's dtype and memory order, and lse `[B, Sq, H]` as in `mla_decode_lse`. No gradient.

A latent number differs from what was packed by at most 2^-4 of itself, or by 2^-10 scales if it is below 2^-6 scales.
""",
    module="mla.packed",
    returns=("out", "lse"),
    fake=_fake_fp8,
    check_values=_check_fp8_values,
    reference=in_torch("mla.packed", "fp8_reference"),
    **no_gradient(FP8, "Call it under torch.no_grad(), or tile.mla_sparse", 1),
    sharding=_sharding_of_fp8,
    flops=_flops_of_fp8,
    lower_precision=("q", "q_pe"),
)
mla_sparse: Final = declare(
    SPARSE,
    MlaSparseArgs[Tensor],
    tuple[Tensor, Tensor],
    """Latent attention in which each query sees the positions that a list names (DeepSeek-V3.2, DSA).

`softmax(scale (q kv^T + q_pe k_pe^T)) kv` over the listed positions, for decoding and for prefilling. `lightning_index`
makes such lists.

Args:
    q: `[B, Sq, H, C]`: queries already multiplied into the latent space.
    q_pe: `[B, Sq, H, R]`: their rotary part.
    kv: `[B, S, C]`, or `[pages, page, C]` with a block_table.
    k_pe: `[B, S, R]`, or `[pages, page, R]`.
    indices: int32 `[B, Sq, n]`: positions in the sequence. -1, and whatever does not exist, is left out. One that
        stands twice counts twice. Nothing else hides a position: causal lists name none behind a query.
    block_table: as in `mla_decode`.
    seq_lens: int32 `[B]`: positions in use; default all of the cache.
    scale: default `(C + R) ** -0.5`; pass a model's own.
    num_splits: as in `mla_decode`.

Returns:
    out `[B, Sq, H, C]` in q's dtype and memory order; a query that sees no position gives 0. lse `[B, Sq, H]` in
    float32 (float64 for float64), `-inf` there; it is not differentiable. Gradients in q, q_pe, kv and k_pe are
    computed in plain torch.
""",
    module="mla.packed",
    returns=("out", "lse"),
    fake=_fake_sparse,
    check_values=lambda args: _check_values(SPARSE, args.kv, args),
    reference=in_torch("mla.packed", "sparse_reference"),
    **by_autograd("mla.packed", "sparse_reference", 1),
    sharding=_sharding_of_sparse,
    flops=_flops_of_sparse,
    lower_precision=("q", "q_pe", "kv", "k_pe"),
)


@documented
def pack_latents(kv: Tensor, k_pe: Tensor) -> Tensor:
    """Round latents to float8 and put them beside their rotary parts, as `mla_decode_fp8` reads them.

    Args:
        kv: `[.., C]`, of any floating dtype; C is a multiple of 128.
        k_pe: `[.., R]`.

    Returns:
        uint8 `[.., C + C / 32 + 2 R]`: see `mla_decode_fp8`. A scale is the largest magnitude of a run over 448, at
        least 2^-100. Plain torch, without a gradient.
    """
    op = "pack_latents"
    checks.check_floating(op, kv=kv, k_pe=k_pe)
    checks.check_dims(op, "k_pe", k_pe, kv.dim(), "kv's and R for C")
    checks.check_sizes(op, "k_pe", k_pe, kv.shape[:-1], "as kv")
    width = kv.shape[-1]
    require(width % GROUP == 0, lambda: f"tile.{op}: kv has {width} columns; expected a multiple of {GROUP}")
    packed: Tensor = kernels("mla.packed").pack(kv.detach(), k_pe.detach())
    return packed


@documented
def append_latents(kv: Tensor, k_pe: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    """Write new positions into the pages of a float8 cache, in place, where `mla_decode_fp8` reads them.

    Args:
        kv: `[B, Sq, C]`: the new latents, which are the last of each sequence.
        k_pe: `[B, Sq, R]`.
        cache: uint8 `[pages, page, bytes]`, whose positions lie at multiples of 4 bytes.
        block_table: int32 `[B, n]`, as for `mla_decode_fp8`.
        seq_lens: int32 `[B]`, the new positions included.

    They are rounded by `pack_latents`, and left out as `append_to_pages` leaves rows out. Raises what these raise.
    """
    from torch_tile.kernels.common import view_as

    op = "append_latents"
    checks.check_dims(op, "kv", kv, 3, "[B, Sq, C]")
    checks.check_dims(op, "cache", cache, 3, "[pages, page, bytes]")
    require_type(cache.dtype == torch.uint8, lambda: f"tile.{op}: cache has dtype {cache.dtype}; expected torch.uint8")
    packed = pack_latents(kv, k_pe)
    checks.check_size(op, "cache", cache, 2, packed.shape[2], "the bytes of a position")
    # Two bytes at a time, as numbers that are only copied: latents with their scales, and rotary parts.
    new, pages = (view_as(x, torch.bfloat16)[:, :, None] for x in (packed, cache))
    split = new.shape[3] - k_pe.shape[2]
    given = new[..., :split], new[..., split:], pages[..., :split], pages[..., split:]
    torch.ops.tile.append_to_pages.default(*given, block_table, seq_lens)
