# SPDX-License-Identifier: Apache-2.0
"""Whether kernels that TileLang takes and this compiler refuses run with a warning. compat.install() says so.

These are reads of tiles that nothing wrote, floats stored as integers, and calls on tensors that require gradients.
Each asks `tolerant()` where it would raise its error.
"""

from __future__ import annotations

_chosen = False


def tolerant() -> bool:
    """Return whether such a kernel runs, with a warning, instead of raising an error."""
    return _chosen


def tolerate(chosen: bool) -> None:
    """Let such kernels run from now on, or refuse them."""
    global _chosen
    _chosen = chosen


__all__ = ["tolerant", "tolerate"]
