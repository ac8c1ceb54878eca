# SPDX-License-Identifier: Apache-2.0
"""Comparison helpers of TileLang's `testing` module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def torch_assert_close(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-2, atol: float = 1e-2,
    max_mismatched_ratio: float = 0.001, **hints: Any,
) -> bool:  # fmt: skip
    """True if at most a share of the elements differs; AssertionError otherwise."""
    from torch_tile.profiler import compare

    compare(actual, expected, atol, rtol, max_mismatched_ratio)
    return True
