# SPDX-License-Identifier: Apache-2.0
"""`tile.grouped_gemm`, a product of each group of rows with its own matrix, and `tile.k_grouped_gemm`, the matrices'
gradients.

Each makes the other's derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_tile.kernels import kernels
from torch_tile.kernels.gemm.args import GemmArgs, GroupedGemmArgs, KGroupedGemmArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_value
from torch_tile.ops.families import gemm
from torch_tile.ops.registration import register
from torch_tile.ops.registry import Shape, op_gradients
from torch_tile.ops.saved_args import restored_args
from torch_tile.ops.sharding_rule import Rule, Spec


def check_order(op: str, offsets: Tensor, rows: int) -> None:
    """Check that groups follow each other within the rows. Only the CPU checks, since a GPU would have to wait."""
    if offsets.device.type != "cpu" or not offsets.numel():
        return
    low, high = (int(x) for x in offsets.aminmax())
    ordered = bool((offsets.diff() >= 0).all())
    what = f"tile.{op}: offsets has values from {low} to {high}{'' if ordered else ', not sorted'}"
    require(ordered and low >= 0 and high <= rows, lambda: f"{what}; expected ends of groups in order, 0 to {rows}")


def check_offsets(op: str) -> Callable[[Any], None]:
    """Make the check of the values of `offsets` for an operator whose groups are rows of `a`."""
    return lambda args: check_order(op, args.offsets, args.a.shape[0])


def _fake(args: GroupedGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.grouped_gemm` and make its empty results."""
    a, bs, offsets, aux, kinds, epilogue, dtype = args
    op = "grouped_gemm"
    require_value(len(bs) > 0, lambda: f"tile.{op}: bs is empty; expected at least one tensor of matrices")
    checks.check_floating(op, a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    checks.check_same_dtype(op, a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    checks.check_result_dtype(op, dtype)
    checks.check_dims(op, "a", a, 2, "[S, K]")
    for i, b in enumerate(bs):
        checks.check_dims(op, f"bs[{i}]", b, 3, "[G, K, N]")
        checks.check_size(op, f"bs[{i}]", b, 0, bs[0].shape[0], "as bs[0]")
        checks.check_size(op, f"bs[{i}]", b, 1, a.shape[1], "a's last dimension")
        checks.check_size(op, f"bs[{i}]", b, 2, bs[0].shape[2], "as bs[0]")
    checks.check_positions(op, "offsets", offsets, 1, "[G], the end of each group", a=a)
    checks.check_size(op, "offsets", offsets, 0, bs[0].shape[0], "as many groups as bs[0]")
    gemm.check_epilogue(op, a, a.shape[:1], bs[0].shape[2], len(bs), aux, kinds, epilogue, bs[0].shape[0])
    return a.new_empty((a.shape[0], bs[0].shape[2]), dtype=dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of `tile.grouped_gemm`."""
    args, _ = restored_args(ctx)
    needs_a, needs_bs = ctx.needs_input_grad[:2]
    grad_a, grad_bs, grad_aux = gradients(args, grad, needs_a, needs_bs)
    return op_gradients(GroupedGemmArgs, a=grad_a, bs=grad_bs, aux=grad_aux)


def gradients(
    args: GroupedGemmArgs[Tensor], grad: Tensor, needs_a: bool, needs_bs: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Compute gradients as `gemm.gradients` does, of auxiliary operands of groups, too."""
    a, bs, offsets, aux, kinds, epilogue, dtype = args

    def product(left: Tensor, matrices: Tensor) -> Tensor:
        found: Tensor = torch.ops.tile.grouped_gemm(left, [matrices], offsets, [], "", "", left.dtype)
        return found

    multiply = gemm.Multiply(
        product,
        lambda grad, b: product(grad, b.mT),
        lambda a, grad: torch.ops.tile.k_grouped_gemm(a, grad, offsets, a.dtype),
    )
    family = kernels("gemm.grouped")
    group = family.groups_of(offsets, a)
    rows, plain = family.of_rows(aux, kinds, group)
    grad_a, grad_bs, of_rows = gemm.gradients(
        GemmArgs(a, bs, rows, plain, epilogue, dtype), grad, needs_a, needs_bs, multiply
    )
    return grad_a, grad_bs, family.of_groups(of_rows, kinds, group, offsets.shape[0])


def _sharding(args: GroupedGemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.grouped_gemm` for sharding."""
    # Ends of groups count rows of the whole tensor, so a shard's are no part of a sum.
    matrices = [("group", "k", "n")] * len(args.bs)
    inputs = [("m", "k"), *matrices, ("group",), *gemm.aux_dims(args.aux, args.kinds, ())]
    return Rule(outputs=[("m", "n")], inputs=inputs, free=("n",))


def grouped_gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    offsets: Tensor,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `gemm` of runs of rows with a matrix each: experts of a mixture (arXiv:1701.06538, arXiv:2211.15841).

    `epilogue(a[rows of g] @ bs[0][g], a[rows of g] @ bs[1][g], ..., aux)` for each group g.

    Args:
        a: `[S, K]`, rows sorted by their group.
        bs: each `[G, K, N]`, of a's dtype.
        offsets: int32 `[G]`: group g has the rows from `offsets[g - 1]` (0 for the first) up to `offsets[g]`. On a GPU
            nobody reads them but the kernel; where they are not sorted or exceed S, results are of no use.
        aux: as for `gemm`, S rows.
        kinds: as for `gemm`, or `g` for `[G, N]`: a row for each group, as biases of experts are.
        epilogue: as for `gemm`.
        dtype: of the result.

    Returns:
        `[S, N]`. Rows from `offsets[-1]` on have no matrices: their products are 0.
    """
    out: Tensor = torch.ops.tile.grouped_gemm.default(a, list(bs), offsets, list(aux), kinds, epilogue, dtype)
    return out


register(
    name="grouped_gemm",
    args=GroupedGemmArgs,
    module="gemm.grouped",
    form=grouped_gemm,
    fake=_fake,
    check_values=check_offsets("grouped_gemm"),
    backward=_backward,
    sharding=_sharding,
    flops=gemm.product_flops,
    lower_precision=("a", "bs"),
)


def _fake_by_k(args: KGroupedGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.k_grouped_gemm` and make its empty results."""
    a, b, offsets, dtype = args
    op = "k_grouped_gemm"
    checks.check_floating(op, a=a, b=b)
    checks.check_same_dtype(op, a=a, b=b)
    checks.check_result_dtype(op, dtype)
    checks.check_dims(op, "a", a, 2, "[S, M]")
    checks.check_dims(op, "b", b, 2, "[S, N]")
    checks.check_size(op, "b", b, 0, a.shape[0], "as many rows as a")
    checks.check_positions(op, "offsets", offsets, 1, "[G], the end of each group", a=a)
    return a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]), dtype=dtype)


def _backward_by_k(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of `tile.k_grouped_gemm`."""
    a, b, offsets = ctx.saved_tensors
    grad = grad.to(a.dtype)
    of_a, of_b = (
        torch.ops.tile.grouped_gemm(x, [matrices], offsets, [], "", "", a.dtype) if needed else None
        for x, matrices, needed in zip((b, a), (grad.mT, grad), ctx.needs_input_grad, strict=False)
    )
    return op_gradients(KGroupedGemmArgs, a=of_a, b=of_b)


def _sharding_by_k(args: KGroupedGemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.k_grouped_gemm` for sharding."""
    return Rule(outputs=[("group", "m", "n")], inputs=[("row", "m"), ("row", "n"), ("group",)], free=("m", "n"))


def _flops_by_k(args: KGroupedGemmArgs[Shape]) -> int:
    """Count the operations of `tile.k_grouped_gemm`."""
    return 2 * math.prod(args.a) * args.b[-1]


def k_grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Compute `a[rows of g].T @ b[rows of g]` for each group g: the gradients of the matrices of `grouped_gemm`.

    Args:
        a: `[S, M]`, rows sorted by their group.
        b: `[S, N]`, of a's dtype.
        offsets: int32 `[G]`, as for `grouped_gemm`.
        dtype: of the result.

    Returns:
        `[G, M, N]`, 0 for groups without rows.
    """
    out: Tensor = torch.ops.tile.k_grouped_gemm.default(a, b, offsets, dtype)
    return out


register(
    name="k_grouped_gemm",
    args=KGroupedGemmArgs,
    module="gemm.grouped_wgrad",
    form=k_grouped_gemm,
    fake=_fake_by_k,
    check_values=check_offsets("k_grouped_gemm"),
    backward=_backward_by_k,
    sharding=_sharding_by_k,
    flops=_flops_by_k,
    lower_precision=("a", "b"),
)
