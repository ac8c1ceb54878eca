# SPDX-License-Identifier: Apache-2.0
"""The arguments of the choice of experts, spelled once for kernels, operators and graphs.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class RouteArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.route`."""

    logits: V
    bias: V | None
    k: int
    score: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_sum: int = 2
    normalise: bool = True
    scale: float = 1.0


class GroupTokensArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.group_tokens`."""

    experts: V
    num_experts: int
