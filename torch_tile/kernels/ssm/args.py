# SPDX-License-Identifier: Apache-2.0
"""The arguments of Mamba-2's scan, of short convolutions and of gradients, spelled once for kernels and operators.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch

V = TypeVar("V")

GRADIENTS = "x", "dt", "A", "B", "C", "D", "dt_bias", "initial_states"
"""The arguments that have gradients, in the order of the results."""


class SsdChunkScanArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.ssd_chunk_scan`, which its documentation explains; V stands for a tensor."""

    x: V
    dt: V
    A: V
    B: V
    C: V
    D: V | None = None
    z: V | None = None
    dt_bias: V | None = None
    initial_states: V | None = None
    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None
    seq_idx: V | None = None


class SsdChunkScanBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.ssd_chunk_scan_backward`: gradients of the results, then the scan's arguments without z."""

    grad: V
    grad_states: V | None
    x: V
    dt: V
    A: V
    B: V
    C: V
    D: V | None = None
    dt_bias: V | None = None
    initial_states: V | None = None
    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None
    seq_idx: V | None = None

    @property
    def forward(self) -> SsdChunkScanArgs[V]:
        """Return the arguments of the scan."""
        return SsdChunkScanArgs(**{n: getattr(self, n) for n in SsdChunkScanArgs._fields if n != "z"})


class SelectiveStateUpdateArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.selective_state_update`."""

    state: V
    x: V
    dt: V
    A: V
    B: V
    C: V
    D: V | None = None
    z: V | None = None
    dt_bias: V | None = None
    dt_softplus: bool = False


class CausalConv1dArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.causal_conv1d`."""

    x: V
    weight: V
    bias: V | None = None
    initial_state: V | None = None
    activation: str = "none"
    seq_idx: V | None = None


class CausalConv1dBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.causal_conv1d_backward`."""

    grad: V
    x: V
    weight: V
    bias: V | None = None
    initial_state: V | None = None
    activation: str = "none"
    seq_idx: V | None = None

    @property
    def forward(self) -> CausalConv1dArgs[V]:
        """Return the arguments of the convolution."""
        return CausalConv1dArgs(*self[1:])


class CausalConv1dUpdateArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.causal_conv1d_update`."""

    x: V
    state: V
    weight: V
    bias: V | None = None
    activation: str = "none"


def empty_gradients(args: SsdChunkScanBackwardArgs[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Allocate the results of the gradient; they are empty for arguments that are not given."""
    given = (getattr(args, name) for name in GRADIENTS)
    return tuple(args.x.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)
