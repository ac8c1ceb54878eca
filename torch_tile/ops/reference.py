# SPDX-License-Identifier: Apache-2.0
"""Ops in plain torch, by name: what Inductor compiles where a kernel cannot be called."""

from __future__ import annotations

from typing import Any

from torch_tile.ops.registry import OPERATORS


def reference(name: str, *args: Any, **kwargs: Any) -> Any:
    """Compute an op in plain torch."""
    operator = OPERATORS[name]
    return operator.reference(operator.args(*args, **kwargs))
