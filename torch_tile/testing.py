# SPDX-License-Identifier: Apache-2.0
"""Comparison helpers of TileLang's `testing` module."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def torch_assert_close(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-2, atol: float = 1e-2,
    max_mismatched_ratio: float = 0.001, verbose: bool = False, equal_nan: bool = True,
) -> bool:  # fmt: skip
    """True if at most a share of the elements differs; AssertionError otherwise.

    NaN equals NaN if `equal_nan`. Devices and dtypes may differ. `verbose` is TileLang's, without effect.
    """
    from torch_tile.profiler import compare

    compare(actual, expected, atol, rtol, max_mismatched_ratio, equal_nan)
    return True
