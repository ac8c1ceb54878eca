# SPDX-License-Identifier: Apache-2.0
"""Calls of `conv` for the catalogue of kernels (library.py): a video decoder's, and windows of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_tile.kernels.conv.conv import conv

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
Call = Callable[[Callable[..., Any]], object]


def window_calls() -> Iterator[tuple[str, Call]]:
    """Yield names and calls, which make their tensors by `make(shape, dtype)`."""
    video, image = (1, 3, 48, 80), (1, 33, 41)
    for name, dtype in DTYPES.items():
        yield f"conv {name} 96", _conv(dtype, (*video, 96), 96, (3, 3, 3), (), (2, 0, 1, 1, 1, 1))
        yield f"conv {name} residual", _conv(dtype, (*video, 192), 192, (3, 3, 3), (), (1, 1, 1), residual=True)
        yield f"conv {name} few filters", _conv(dtype, (*image, 96), 3, (3, 3), (), (1, 1))
        yield f"conv {name} few channels", _conv(dtype, (*image, 3), 64, (7, 7), (2, 2), (3, 3))
        yield f"conv {name} strided", _conv(dtype, (*image, 100), 136, (3, 3), (2, 2), (0, 1, 0, 1), (1, 2))
    half = torch.bfloat16
    yield "conv bf16 wide", _conv(half, (1, 6, 720, 1280, 96), 96, (3, 3, 3), (), (0, 0, 1, 1, 1, 1))
    yield "conv bf16 wide, 3 filters", _conv(half, (1, 6, 720, 1280, 96), 3, (3, 3, 3), (), (0, 0, 1, 1, 1, 1))
    yield "conv bf16 384", _conv(half, (1, 3, 90, 160, 384), 384, (3, 3, 3), (), (0, 0, 1, 1, 1, 1))
    yield "conv bf16 frames", _conv(half, (1, 3, 90, 160, 384), 768, (3, 1, 1), (), (2, 0, 0, 0, 0, 0))
    yield "conv bf16 pixels", _conv(half, (2, 90, 160, 192), 384, (1, 1), (), ())
    yield "conv bf16 sequence", _conv(half, (2, 1500, 80), 384, (3,), (2,), (1,))


def _conv(
    dtype: torch.dtype, x: tuple[int, ...], filters: int, taps: tuple[int, ...], stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...] = (), residual: bool = False,
) -> Call:  # fmt: skip
    """Return a call of `conv` with a bias and SiLU. A residual has the size of x."""

    def call(make: Callable[..., Any]) -> object:
        given = make(x, dtype), make((filters, *taps, x[-1]), dtype), make((filters,), dtype)
        return conv(*given, make(x, dtype) if residual else None, stride, padding, dilation, "silu")

    return call
