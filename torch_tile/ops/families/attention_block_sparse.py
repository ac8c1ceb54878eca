# SPDX-License-Identifier: Apache-2.0
"""`tile.attention_block_sparse`, `_lse` and `_backward`: attention over lists of blocks of keys.

As with `tile.attention`, a call that wants a gradient is the second one, and its backward the third one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.attention.args import BlockSparseArgs, BlockSparseBackwardArgs
from torch_tile.kernels.attention.arguments import FAR, empty_beside
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.families.attention_varlen import SCORES, check_heads, check_ints, counted, kv_head, none_of
from torch_tile.ops.registration import register
from torch_tile.ops.registry import Shape, as_listed, entry, form, in_torch, op_gradients, without_tensors
from torch_tile.ops.sharding_rule import Dims, Rule, Spec, broadcast

LISTS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
LEAST = 16  # rows of a block: tiles of kernels divide blocks


def _lists(args: BlockSparseArgs[Any]) -> list[tuple[str, Any, str, Any]]:
    """Return the lists that are given: the names and tensors of numbers and indices."""
    found = [(LISTS[n], getattr(args, LISTS[n]), LISTS[n + 1], getattr(args, LISTS[n + 1])) for n in (0, 2)]
    return [x for x in found if x[1] is not None or x[3] is not None]


def _check(args: BlockSparseArgs[Tensor]) -> None:
    """Check the arguments of `tile.attention_block_sparse`."""
    op, (q, k, v) = "attention_block_sparse", args[:3]
    checks.check_floating(op, q=q, k=k, v=v)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    checks.check_dims(op, "q", q, 4, "[B, H, Sq, D]")
    checks.check_dims(op, "k", k, 4, "[B, Hkv, Skv, D]")
    checks.check_dims(op, "v", v, 4, "[B, Hkv, Skv, Dv]")
    checks.check_size(op, "k", k, 0, q.shape[0], "q's batch")
    checks.check_size(op, "k", k, 3, q.shape[3], "q's head dimension")
    for dim, what in enumerate(("k's batch", "k's heads", "k's length")):
        checks.check_size(op, "v", v, dim, k.shape[dim], what)
    check_heads(op, q.shape[1], k.shape[1])
    _check_block("block_q", args.block_q)
    _check_block("block_kv", args.block_kv)
    blocks = -(-q.shape[2] // args.block_q)
    for number_name, numbers, index_name, indices in _lists(args):
        _check_both(number_name, numbers, index_name, indices)
        check_ints(op, number_name, numbers, 3, "[B or 1, H or 1, blocks of queries]", q)
        check_ints(op, index_name, indices, 4, "[B or 1, H or 1, blocks of queries, n]", q)
        for dim in range(3):
            checks.check_size(op, index_name, indices, dim, numbers.shape[dim], f"as {number_name}")
        checks.check_size(op, number_name, numbers, 2, blocks, f"q's blocks of {args.block_q} queries")
        checks.check_broadcasts(op, number_name, numbers, (q.shape[0], q.shape[1], blocks))
    require_value(
        args.window >= 0, lambda: f"tile.{op}: window is {args.window}; expected 0 (none) or a positive length"
    )
    offset = args.q_offset
    if isinstance(offset, int):  # a symbol is the difference of lengths, so that no bound of it has to be guarded
        require_value(abs(offset) <= FAR, lambda: f"tile.{op}: q_offset is {offset}; expected {-FAR} to {FAR}")
    for i, x in enumerate(args.aux or ()):
        checks.check_auxiliary(op, f"aux[{i}]", x, "q", q)
        checks.check_broadcasts(op, f"aux[{i}]", x, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    require_value(
        not args.aux or bool(args.score), lambda: f"tile.{op}: aux is given, but score, which would read it, is empty"
    )
    from torch_tile.kernels.epilogue.program import parse

    parse(args.score, 1, len(args.aux or ()), len(SCORES))


def _check_block(name: str, size: int) -> None:
    """Check the size of a block."""
    require_value(
        size > 0 and size % LEAST == 0,
        lambda: f"tile.attention_block_sparse: {name} is {size}; expected a multiple of {LEAST}",
    )


def _check_both(number_name: str, numbers: Any, index_name: str, indices: Any) -> None:
    """Check that numbers and indices of lists are given together."""
    require(
        numbers is not None and indices is not None,
        lambda: f"tile.attention_block_sparse: one of {number_name} and {index_name} is None; expected both or none",
    )


def _check_values(args: BlockSparseArgs[Tensor]) -> None:
    """Check the values of lists on the CPU: blocks that exist, none of them twice."""
    q, blocks = args.q, -(-args.k.shape[2] // args.block_kv)
    if q.device.type != "cpu" or not q.numel():
        return
    times = sum(_times(*x, blocks) for x in _lists(args))
    require(
        not bool((torch.as_tensor(times) > 1).any()),
        lambda: "tile.attention_block_sparse: a block of queries names a block of keys twice; expected distinct ones",
    )


def _times(number_name: str, numbers: Tensor, index_name: str, indices: Tensor, blocks: int) -> Tensor:
    """Count how often lists name each block; check that it exists."""
    op, most = "attention_block_sparse", indices.shape[3]
    require(
        bool(((numbers >= 0) & (numbers <= most)).all()),
        lambda: f"tile.{op}: {number_name} has numbers outside of 0 to {most}, the last size of {index_name}",
    )
    named = torch.arange(most) < numbers[..., None]
    used = indices[named]
    require(
        bool(((used >= 0) & (used < blocks)).all()),
        lambda: f"tile.{op}: {index_name} names blocks outside of 0 to {blocks - 1}",
    )
    at = torch.where(named, indices, blocks).long()
    return torch.zeros((*at.shape[:-1], blocks + 1), dtype=torch.int32).scatter_add_(-1, at, named.int())[..., :blocks]


def _fake_with_lse(args: BlockSparseArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.attention_block_sparse` and make its empty results."""
    _check(args)
    q = args.q
    return empty_beside(q, args.v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _in_training(args: BlockSparseArgs[Tensor]) -> Tensor:
    """Run the op that keeps what the backward needs."""
    out: Tensor = torch.ops.tile.attention_block_sparse_lse.default(*args)[0]
    return out


def _tensors(args: BlockSparseArgs[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the tensors among the arguments, in order."""
    return (*args[:7], *(args.aux or ()))


def _with_tensors(options: BlockSparseArgs[Any], tensors: Sequence[Tensor | None]) -> BlockSparseArgs[Any]:
    """Return arguments with the tensors of `_tensors`, and the other fields from the `options`."""
    named: dict[str, Any] = dict(zip(BlockSparseArgs._fields, tensors[:7], strict=False))
    return options._replace(**named, aux=None if options.aux is None else list(tensors[7:]))


def _save(ctx: Any, args: BlockSparseArgs[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save for the gradient of `tile.attention_block_sparse` what it needs."""
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*_tensors(args), *output)
    ctx.args = without_tensors(args)


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.attention_block_sparse`."""
    *tensors, out, lse = ctx.saved_tensors
    fields = len(BlockSparseArgs._fields)
    needs = BlockSparseArgs(*ctx.needs_input_grad, *[None] * (fields - len(ctx.needs_input_grad)))
    of_aux = none_of("attention_block_sparse", needs.aux)
    # Gradients of gradients are computed from the inputs alone.
    given = _with_tensors(ctx.args, tensors).backward(grad, out.detach(), lse.detach())
    dq, dk, dv = torch.ops.tile.attention_block_sparse_backward.default(*given)
    return op_gradients(BlockSparseArgs, q=dq, k=dk, v=dv, aux=of_aux)


def _fake_backward(args: BlockSparseBackwardArgs[Tensor]) -> tuple[Tensor, ...]:
    """Check the arguments of `tile.attention_block_sparse_backward` and make its empty results."""
    op = "attention_block_sparse_backward"
    _check(args.forward)
    q, v, lse = args.q, args.v, args.lse
    checks.check_same_dtype(op, q=q, grad=args.grad, out=args.out)
    sizes = (*q.shape[:3], v.shape[3])
    for name, x, dims in (("grad", args.grad, 4), ("out", args.out, 4), ("lse", lse, 3)):
        checks.check_device(op, name, x, "q", q)
        checks.check_dims(op, name, x, dims, "[B, H, Sq, Dv]" if dims == 4 else "[B, H, Sq]")
        for dim, what in enumerate(("q's batch", "q's heads", "q's length", "v's head dimension")[:dims]):
            checks.check_size(op, name, x, dim, sizes[dim], what)
    sums = compute_dtype(q.dtype)
    require_type(lse.dtype == sums, lambda: f"tile.{op}: lse has dtype {lse.dtype}; expected {sums}")
    return tuple(empty_beside(x, x.shape[3]) for x in (q, args.k, v))


def _save_backward(ctx: Any, args: BlockSparseBackwardArgs[Tensor], output: Any) -> None:
    """Save for the gradient of `tile.attention_block_sparse_backward` what it needs."""
    ctx.save_for_backward(args.grad, *_tensors(args.forward))
    ctx.args = without_tensors(args.forward)


def _twice(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Compute gradients of gradients by autograd of the reference. `out` and `lse` stand for the inputs of their
    computation.
    """
    saved: tuple[Any, ...] = ctx.saved_tensors
    fields = len(BlockSparseBackwardArgs._fields)
    needs = BlockSparseBackwardArgs(*ctx.needs_input_grad, *[None] * (fields - len(ctx.needs_input_grad)))
    of_aux = none_of("attention_block_sparse_backward", needs.aux)
    wanted = [n for n, needed in enumerate((needs.grad, needs.q, needs.k, needs.v)) if needed]
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, as what one of them was computed from is no way for gradients here.
        given = [x if x is None or n > 3 else x.view_as(x) if twice else x.detach() for n, x in enumerate(saved)]
        leaves = [given[n].requires_grad_() for n in wanted]
        found = kernels("attention_block_sparse").gradients(given[0], _with_tensors(ctx.args, given[1:]))
        found = [new.to(x.dtype) for new, x in zip(found, saved[1:4], strict=True)]
        made = torch.autograd.grad(found, leaves, grads, create_graph=twice, allow_unused=True)
    grad, q, k, v = map(dict(zip(wanted, made, strict=True)).get, range(4))
    return op_gradients(BlockSparseBackwardArgs, grad=grad, q=q, k=k, v=v, aux=of_aux)


def _sharding(args: BlockSparseArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.attention_block_sparse` for sharding."""
    heads = args.k.shape[1]
    hidden = counted(args.score)
    outputs: tuple[Dims, Dims] = ("batch", "head", "query", "v"), ("batch", "head", "query")
    inputs = (
        ("batch", "head", "query", "d"),
        ("batch", kv_head(heads), "key", "d"),
        ("batch", kv_head(heads), "key", "v"),
        *(broadcast(x, (*("batch", "head", "block"), *["index"] * (n % 2))) for n, x in enumerate(args[3:7])),
        *(broadcast(x, SCORES) for x in args.aux or ()),
    )
    return Rule(
        outputs=outputs,
        inputs=inputs,
        saved=(*inputs, *outputs),
        free=tuple(dim for dim in ("batch", "head") if dim not in hidden),
        even={} if heads == 1 else {"head": heads},
    )


def _sharding_of_backward(args: BlockSparseBackwardArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.attention_block_sparse_backward` for sharding."""
    forward = _sharding(args.forward)
    q_dims, k_dims, v_dims, *others = forward.inputs
    out_dims, lse_dims = forward.outputs
    tensors = [dims for dims in (q_dims, k_dims, v_dims) if dims is not None]
    # Keys' gradients are sums over the heads that share them.
    free = forward.free if args.k.shape[1] != 1 else tuple(dim for dim in forward.free if dim != "head")
    return Rule(
        outputs=tensors,
        inputs=[out_dims, *tensors, out_dims, lse_dims, *others],
        free=free,
        even=forward.even,
        saved=[out_dims, *tensors, *others],
    )


def _flops(args: BlockSparseArgs[Shape]) -> int:
    """Count the operations of `tile.attention_block_sparse`."""
    return _products(args, 1, 1)


def _backward_flops(args: BlockSparseBackwardArgs[Shape]) -> int:
    """Count the operations of `tile.attention_block_sparse_backward`."""
    return _products(args.forward, 3, 2)


def _products(args: BlockSparseArgs[Shape], over_d: int, over_v: int) -> int:
    """Count the operations of the products, as if each list named as many blocks as it has room for."""
    room = sum(indices[3] for indices in (args.kv_indices, args.full_kv_indices) if indices is not None)
    keys = min(room * args.block_kv, args.k[2])
    return 2 * math.prod(args.q[:3]) * keys * (over_d * args.q[3] + over_v * args.v[3])


attention_block_sparse: Final = form(
    "attention_block_sparse",
    BlockSparseArgs[Tensor],
    Tensor,
    """Scaled dot-product attention in which lists say which blocks of keys each block of queries sees.

`softmax(score(scale q k^T)) v` over the keys of the listed blocks (arXiv:1904.10509). No mask of all pairs is made.
The lists are those of flex_attention's `BlockMask`.

Args:
    q: `[B, H, Sq, D]`.
    k: `[B, Hkv, Skv, D]`; H must be a multiple of Hkv, and query head `h` reads key head `h // (H / Hkv)`.
    v: `[B, Hkv, Skv, Dv]`.
    kv_num_blocks: int32 `[B or 1, H or 1, ceil(Sq / block_q)]`: how many blocks a list names.
    kv_indices: int32, the same and one more dimension: the numbers of the blocks, in any order. What stands behind
        them is not read for values.
    full_kv_num_blocks: the same of further lists, as `BlockMask` keeps them of blocks that show all their keys.
    full_kv_indices: their numbers. No list of a block of queries names a block twice, nor do both.
    block_q: queries of a block, a multiple of 16.
    block_kv: keys of a block, a multiple of 16.
    causal: as in `attention`, and so are the options that follow; they hide keys of all listed blocks.
    scale: default `D ** -0.5`.
    window: 0 for none.
    q_offset: position of the first query.
    aux: operands of `score`, of a floating dtype or bool, each broadcastable to `[B, H, Sq, Skv]`. They have no
        gradient.
    score: a text that changes scores.

Returns:
    `[B, H, Sq, Dv]` in q's dtype, in q's memory order. A query that sees no key gives 0.

Values of lists are checked on the CPU only. Gradients are the same from run to run.
""",
)
attention_block_sparse_lse: Final = form(
    "attention_block_sparse_lse",
    BlockSparseArgs[Tensor],
    tuple[Tensor, Tensor],
    """`attention_block_sparse`, and the natural logarithm of each softmax's denominator.

Returns:
    out as `attention_block_sparse`, lse `[B, H, Sq]` in float32 (float64 for float64), `-inf` for a query that sees no
    key. lse is not differentiable.
""",
)


def attention_block_sparse_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None = None,
    full_kv_indices: Tensor | None = None,
    block_q: int = 128,
    block_kv: int = 128,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int | torch.SymInt = 0,
    aux: Sequence[Tensor] | None = None,
    score: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_block_sparse` in q, k and v, computed as in arXiv:2307.08691; the same from run to run.

    Args:
        grad: `[B, H, Sq, Dv]`, of q's dtype: the gradient of `out`.
        q: as for `attention_block_sparse`.
        k: `[B, Hkv, Skv, D]`.
        v: `[B, Hkv, Skv, Dv]`.
        out: what `attention_block_sparse_lse` returned first.
        lse: what it returned second.
        kv_num_blocks: this and what follows as for `attention_block_sparse`.
        kv_indices: the same.
        full_kv_num_blocks: the same.
        full_kv_indices: the same.
        block_q: the same.
        block_kv: the same.
        causal: the same.
        scale: the same.
        window: the same.
        q_offset: the same.
        aux: the same.
        score: the same.

    Returns:
        dq, dk and dv with the shapes and dtypes of q, k and v, dense, in their memory order.
    """
    lists = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, block_q, block_kv
    given = BlockSparseArgs(q, k, v, *lists, causal, scale, window, q_offset, aux, score).backward(grad, out, lse)
    dq, dk, dv = torch.ops.tile.attention_block_sparse_backward.default(*map(as_listed, given))
    return dq, dk, dv


_COMMON: dict[str, Any] = {
    "args": BlockSparseArgs,
    "check_values": _check_values,
    "sharding": _sharding,
    "flops": _flops,
    "lower_precision": ("q", "k", "v", "aux"),
}
FAMILY = "attention_block_sparse"
register(
    name=FAMILY,
    form=attention_block_sparse,
    fake=lambda args: _fake_with_lse(args)[0],
    run=entry(FAMILY, FAMILY, "out", needs_lse=False),
    reference=in_torch(FAMILY, only_first=True),
    in_training=_in_training,
    **_COMMON,
)
register(
    name="attention_block_sparse_lse",
    returns=("out", "lse"),
    form=attention_block_sparse_lse,
    fake=_fake_with_lse,
    run=entry(FAMILY, FAMILY, "out", "lse"),
    reference=in_torch(FAMILY),
    setup_context=_save,
    backward=_gradients,
    **_COMMON,
)
register(
    name="attention_block_sparse_backward",
    args=BlockSparseBackwardArgs,
    returns=("dq", "dk", "dv"),
    form=attention_block_sparse_backward,
    fake=_fake_backward,
    check_values=lambda args: _check_values(args.forward),
    run=lambda args, out: kernels(FAMILY).attention_block_sparse_backward(*args, results=out),
    reference=in_torch(FAMILY, "backward_reference"),
    setup_context=_save_backward,
    backward=_twice,
    sharding=_sharding_of_backward,
    flops=_backward_flops,
)
