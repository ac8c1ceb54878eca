# SPDX-License-Identifier: Apache-2.0
"""`tile.grouped_gemm`, a product of each group of rows with a matrix of its own, and `tile.k_grouped_gemm`, which gives
these matrices their gradients. Each makes the other's derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.families import gemm
from torch_tile.ops.registration import register


def _check_offsets(op: str, offsets: torch.Tensor, a: torch.Tensor, meaning: str) -> None:
    require_type(
        offsets.dtype == torch.int32, lambda: f"tile.{op}: offsets has dtype {offsets.dtype}; expected torch.int32"
    )
    checks.check_device(op, "offsets", offsets, "a", a)
    checks.check_dims(op, "offsets", offsets, 1, meaning)


def _check_order(op: str, offsets: torch.Tensor, rows: int) -> None:
    """Groups follow each other within the rows. On the CPU only: elsewhere reading them would wait."""
    if offsets.device.type != "cpu" or not offsets.numel():
        return
    low, high = (int(x) for x in offsets.aminmax())
    ordered = bool((offsets.diff() >= 0).all())
    what = f"tile.{op}: offsets has values from {low} to {high}{'' if ordered else ', not sorted'}"
    require(ordered and low >= 0 and high <= rows, lambda: f"{what}; expected ends of groups in order, 0 to {rows}")


def _check(
    a: torch.Tensor, bs: Sequence[torch.Tensor], offsets: torch.Tensor, aux: Sequence[torch.Tensor], kinds: str,
    epilogue: str, dtype: Any,
) -> None:  # fmt: skip
    op = "grouped_gemm"
    require_value(len(bs) > 0, lambda: f"tile.{op}: bs is empty; expected at least one tensor of matrices")
    checks.check_floating(op, a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    checks.check_same_dtype(op, a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    require_type(dtype in checks.FLOATING, lambda: f"tile.{op}: dtype is {dtype}; expected a floating dtype")
    checks.check_dims(op, "a", a, 2, "[S, K]")
    for i, b in enumerate(bs):
        checks.check_dims(op, f"bs[{i}]", b, 3, "[G, K, N]")
        checks.check_size(op, f"bs[{i}]", b, 0, bs[0].shape[0], "as bs[0]")
        checks.check_size(op, f"bs[{i}]", b, 1, a.shape[1], "a's last dimension")
        checks.check_size(op, f"bs[{i}]", b, 2, bs[0].shape[2], "as bs[0]")
    _check_offsets(op, offsets, a, "[G], the end of each group")
    checks.check_size(op, "offsets", offsets, 0, bs[0].shape[0], "as many groups as bs[0]")
    gemm.check_epilogue(op, a, a.shape[:1], bs[0].shape[2], len(bs), aux, kinds, epilogue)


def _fake(
    a: torch.Tensor, bs: Sequence[torch.Tensor], offsets: torch.Tensor, aux: Sequence[torch.Tensor], kinds: str,
    epilogue: str, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    _check(a, bs, offsets, aux, kinds, epilogue, dtype)
    return a.new_empty((a.shape[0], bs[0].shape[2]), dtype=dtype)


def _check_values(a: torch.Tensor, bs: Sequence[torch.Tensor], offsets: torch.Tensor, *_: Any) -> None:
    _check_order("grouped_gemm", offsets, a.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, bs, offsets, aux, ctx.kinds, ctx.epilogue, _ = inputs
    ctx.num_products = len(bs)
    ctx.save_for_backward(a, *bs, offsets, *aux)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, *rest = ctx.saved_tensors
    bs, offsets, aux = rest[: ctx.num_products], rest[ctx.num_products], rest[ctx.num_products + 1 :]

    def product(left: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.tile.grouped_gemm(left, [matrices], offsets, [], "", "", left.dtype)
        return found

    multiply = gemm.Multiply(
        product,
        lambda grad, b: product(grad, b.mT),
        lambda a, grad: torch.ops.tile.k_grouped_gemm(a, grad, offsets, a.dtype),
    )
    needs_a, needs_bs = ctx.needs_input_grad[:2]
    grad_a, grad_bs, grad_aux = gemm.gradients(a, bs, aux, ctx.kinds, ctx.epilogue, grad, needs_a, needs_bs, multiply)
    return grad_a, grad_bs, None, grad_aux, None, None, None


register(
    "grouped_gemm",
    fake=_fake,
    check_values=_check_values,
    backward=_backward,
    setup_context=_save,
    lower_precision=("a", "bs"),
    flops=gemm.flops,
)


def _fake_by_k(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    op = "k_grouped_gemm"
    checks.check_floating(op, a=a, b=b)
    checks.check_same_dtype(op, a=a, b=b)
    require_type(dtype in checks.FLOATING, lambda: f"tile.{op}: dtype is {dtype}; expected a floating dtype")
    checks.check_dims(op, "a", a, 2, "[S, M]")
    checks.check_dims(op, "b", b, 2, "[S, N]")
    checks.check_size(op, "b", b, 0, a.shape[0], "as many rows as a")
    _check_offsets(op, offsets, a, "[G], the end of each group")
    return a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]), dtype=dtype)


def _check_values_by_k(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *_: Any) -> None:
    _check_order("k_grouped_gemm", offsets, a.shape[0])


def _save_by_k(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward_by_k(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b, offsets = ctx.saved_tensors
    grad = grad.to(a.dtype)
    of_a, of_b = (
        torch.ops.tile.grouped_gemm(x, [matrices], offsets, [], "", "", a.dtype) if needed else None
        for x, matrices, needed in zip((b, a), (grad.mT, grad), ctx.needs_input_grad, strict=False)
    )
    return of_a, of_b, None, None


def _flops_by_k(a: Sequence[int], b: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(a) * b[-1]


register(
    "k_grouped_gemm",
    fake=_fake_by_k,
    check_values=_check_values_by_k,
    backward=_backward_by_k,
    setup_context=_save_by_k,
    lower_precision=("a", "b"),
    flops=_flops_by_k,
)
