# SPDX-License-Identifier: Apache-2.0
"""Comparisons and requirements as TVM's tests write them."""

from __future__ import annotations

from typing import Any

from torch_tile.testing import main as main, requires_package as requires_package


def assert_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 1e-7) -> None:
    """Raise AssertionError unless two arrays or tensors of one shape are close."""
    import numpy as np

    if np.shape(actual) != np.shape(desired):
        raise AssertionError(f"the shapes {np.shape(actual)} and {np.shape(desired)} differ")
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=atol)


__all__ = ["assert_allclose", "main", "requires_package"]
