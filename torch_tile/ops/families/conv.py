# SPDX-License-Identifier: Apache-2.0
"""`tile.conv`, a convolution over 1 to 3 dimensions with dense channels, and a fused epilogue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from torch_tile.kernels import kernels
from torch_tile.kernels.conv.args import ConvArgs, result_dtype
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_value
from torch_tile.ops.matrix_units import ACTIVATIONS, is_left_to_torch
from torch_tile.ops.recomputed import by_autograd
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape
from torch_tile.ops.sharding_rule import Rule, Spec, if_given

OP = "conv"


def _check_per_dimension(name: str, given: Sequence[int], lengths: tuple[int, ...], least: int) -> None:
    """Check that the length of `given` is one of `lengths` and that no number is below `least`."""
    require_value(
        len(given) in lengths and all(n >= least for n in given),
        lambda: (
            f"tile.{OP}: {name} is {list(given)}; expected {' or '.join(map(str, lengths))} numbers of at least {least}"
        ),
    )


def _fake(args: ConvArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.conv` and make its empty results."""
    x, weight, bias, residual, stride, padding, dilation, activation = args
    checks.check_floating(OP, x=x, weight=weight, bias=bias, residual=residual)
    checks.check_same_dtype(OP, x=x, weight=weight, bias=bias)
    dims = x.dim() - 2
    require(1 <= dims <= 3, lambda: f"tile.{OP}: x has {x.dim()} dimensions; expected 3 to 5: [N, *sizes, C]")
    require(
        weight.dim() == x.dim(),
        lambda: (
            f"tile.{OP}: x has {x.dim()} dimensions {list(x.shape)} and weight {weight.dim()} {list(weight.shape)}; "
            f"expected as many, with channels last: [N, *sizes, C] and [F, *taps, C]"
        ),
    )
    checks.check_size(OP, "weight", weight, -1, x.shape[-1], "x's last dimension: channels come last in both")
    checks.check_vector(OP, "bias", bias, weight.shape[0], "weight's first dimension")
    checks.check_activation(OP, activation)
    _check_per_dimension("stride", stride, (0, dims), 1)
    _check_per_dimension("padding", padding, (0, dims, 2 * dims), 0)
    _check_per_dimension("dilation", dilation, (0, dims), 1)
    require(
        all(n >= 1 for n in weight.shape[1:-1]), lambda: f"tile.{OP}: weight has shape {tuple(weight.shape)}, no taps"
    )
    sizes = args.window(dims).sizes(x.shape[1:-1], weight.shape[1:-1])
    for dim, size in enumerate(sizes):
        require(size >= 1, lambda: f"tile.{OP}: x's dimension {dim + 1} is shorter than the window")  # noqa: B023
    if residual is not None:
        checks.check_dims(OP, "residual", residual, x.dim(), "[N, *sizes, F], as the result")
        checks.check_sizes(OP, "residual", residual, (x.shape[0], *sizes, weight.shape[0]), "as the result")
    dtype = result_dtype(x.dtype, None if residual is None else residual.dtype)
    return x.new_empty((x.shape[0], *sizes, weight.shape[0]), dtype=dtype)


def _run(args: ConvArgs[Tensor], out: Tensor) -> None:
    """Launch `tile.conv` into `out`, or let torch compute it."""
    x, weight, bias, residual, *_, activation = args
    dims = x.dim() - 2
    window = args.window(dims)
    if is_left_to_torch(x) and dims > 1 and residual is None and window.before == window.after and out.numel():
        convolved = torch.ops.mkldnn._convolution_pointwise(
            x.movedim(-1, 1), weight.movedim(-1, 1), bias, window.before, window.stride, window.dilation, 1,
            *ACTIVATIONS[activation],
        )  # fmt: skip
        out.copy_(convolved.movedim(1, -1))
        return
    kernels("conv.conv").conv(*args, out=out)


def _sharding(args: ConvArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.conv` for sharding: sizes between images and channels stay whole."""
    dims = range(len(args.x.shape) - 2)
    result = ("image", *(f"out{n}" for n in dims), "filter")
    return Rule(
        outputs=[result],
        inputs=[
            ("image", *(f"size{n}" for n in dims), "channel"),
            ("filter", *(f"tap{n}" for n in dims), "channel"),
            if_given(args.bias, ("filter",)),
            if_given(args.residual, result),
        ],
        free=("image", "filter"),
        summed=("channel",) if args.bias is None and args.residual is None and args.activation == "none" else (),
    )


def _flops(args: ConvArgs[Shape]) -> int:
    """Count the operations of `tile.conv`, those on padding among them."""
    x, weight = args.x, args.weight
    sizes = args.window(len(x) - 2).sizes(x[1:-1], weight[1:-1])
    return 2 * math.prod((x[0], *sizes, *weight))


conv: Final = declare(
    OP,
    ConvArgs[Tensor],
    Tensor,
    """`activation(convolution(x, weight) + bias) + residual`, over 1 to 3 dimensions, with the channels last.

`x.movedim(1, -1)` and `weight.movedim(1, -1)` of tensors in torch's channels_last formats are views that fit. The
kernel multiplies boxes of pixels by filters, tap by tap, and copies nothing but x's of other strides or whose channels
are no multiple of 16 bytes. Gradients are torch's own convolutions.

Args:
    x: `[N, *sizes, C]`, with one to three sizes.
    weight: `[F, *taps, C]`, of x's dtype.
    bias: `[F]`, of x's dtype.
    residual: `[N, *result sizes, F]`, of any floating dtype.
    stride: a number for each size; none for 1.
    padding: zeros around x: a number for each size, or two, before and behind. None for 0.
    dilation: a number for each size; none for 1.
    activation: as for `linear`.

Returns:
    `[N, *result sizes, F]` in x's dtype promoted with the residual's.
""",
    module="conv.conv",
    fake=_fake,
    run=_run,
    **by_autograd("conv.conv", "differentiable"),
    sharding=_sharding,
    flops=_flops,
    lower_precision=("x", "weight", "bias"),
)
