# SPDX-License-Identifier: Apache-2.0
"""What the kernels of Mamba-2's scan and of its gradient share: tilings, tensor types and step sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import compute_dtype, dynamic, strided

FAST = {"tl.enable_fast_math": True}  # for kernels of many decays: those too small for normal numbers may be 0
DECAY_HEADS = 8  # heads of a block that sums up decays


@dataclass(frozen=True)
class Config:
    """A tiling: chunks of `chunk` times. A block computes `rows` of them and loops over the others by `step`.

    A tile has `head_tile` columns of P and `state_tile` columns of N. States of `pass_stages` chunks are on their way
    while they are passed on. With `whole` the forward is one kernel, whose blocks go from chunk to chunk. One kernel
    has the states between chunks with `carried`. A block with several `heads`, one after the other, loads states of
    `head_stages` of them ahead.
    """

    chunk: int = 64
    rows: int = 64
    step: int = 64
    head_tile: int = 64
    state_tile: int = 64
    threads: int = 128
    stages: int = 2
    pass_stages: int = 4
    head_stages: int = 2
    shared_weights: bool = False
    heads: int = 1
    blocks: int = 1
    staged: bool = False
    whole: bool = False
    carried: bool = False


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of the scan's kernels: dtypes (None for absent operands), vector width, and flags.

    `vector` divides P, N and the strides of rows. With `reverse` a kernel is the gradient's: it scans from the end.
    With `split` several blocks add up the heads of a group. `packed` kernels have the marks of sequences
    (`mark_sequences`).
    """

    dtype: torch.dtype
    dt: torch.dtype = torch.float32
    A: torch.dtype = torch.float32
    dt_bias: torch.dtype | None = None
    D: torch.dtype | None = None
    z: torch.dtype | None = None
    initial: torch.dtype | None = None
    softplus: bool = False
    vector: int = 1
    reverse: bool = False
    dots: bool = False
    split: bool = False
    seq_idx: torch.dtype | None = None
    packed: bool = False

    @property
    def compute(self) -> torch.dtype:
        """Return the dtype of sums and decays."""
        return compute_dtype(self.dtype)


@T.macro
def step_size(spec: Spec, dt: Any, bias: Any, low: Any, high: Any) -> Any:
    """Compute the step size of a time and head: clamped, before clamping, and before softplus. Return it within its
    limits, before them, and before softplus.
    """
    raw = T.cast(dt, spec.compute)
    if spec.dt_bias is not None:
        raw = raw + T.cast(bias, spec.compute)
    value = raw
    if spec.softplus:
        value = T.max(raw, 0.0) + T.log(1.0 + T.exp(-T.abs(raw)))
        # The logarithm of 1 + e is no digit of e where e is small; there the series is.
        small = T.exp(raw)
        value = T.if_then_else(raw < -10.0, small * (1.0 - 0.5 * small), value)
    return T.min(T.max(value, low), high), value, raw


@T.macro
def add_weighed(spec: Any, state: Any, weighed: Any, value_tile: Any, key_tile: Any, factors: Any, start: int) -> None:
    """Add a tile's values, weighed by factors from `start` on, times its keys to a state.

    Values are weighed in registers, from where the product takes them. With two fragments `weighed` by turns, a product
    runs beside the weights of the next tile.
    """
    values = T.alloc_fragment(tuple(reversed(weighed.shape)), spec.dtype)
    T.copy(value_tile, values)
    for i, j in T.Parallel(*weighed.shape):
        weighed[i, j] = T.cast(T.cast(values[j, i], spec.compute) * factors[start + j], spec.dtype)
    T.gemm(weighed, key_tile, state)


class Sizes:
    """The run-time sizes of a scan."""

    b: Any
    length: Any
    h: Any
    g: Any
    states_of: Any
    p: Any
    n: Any

    def __init__(self, config: Config, spec: Spec) -> None:
        self.b, self.length, self.h, self.g, self.states_of = T.dynamic("b, length, h, g, states_of")
        self.p, self.n = (dynamic(name, spec.vector) for name in ("p", "n"))
        self.padded: Any = dynamic("padded", config.chunk)
        self.count: Any = self.padded // config.chunk

    def values(self, name: str, spec: Spec) -> Any:
        """Return the type of a tensor `[B, L, H, P]`."""
        return strided(name, (self.b, self.length, self.h, self.p), spec.dtype, multiple=spec.vector)

    def keys(self, name: str, spec: Spec) -> Any:
        """Return the type of a tensor `[B, L, G, N]`."""
        return strided(name, (self.b, self.length, self.g, self.n), spec.dtype, multiple=spec.vector)

    def per_time(self, spec: Spec) -> Any:
        """Return the type of numbers for each time, `[B, H, padded]`."""
        return T.Tensor((self.b, self.h, self.padded), spec.compute)

    def marks(self, spec: Spec) -> list[Any]:
        """Return the type of the marks of packed sequences, in a list that is empty without."""
        return [T.Tensor((self.b, self.padded), "int32")] if spec.packed else []

    def states(self, dtype: torch.dtype) -> Any:
        """Return the type of states, one for each chunk and one more, which `chunk_states` leaves alone.

        A tensor of so many chunks would ask whether they are 1, which is unknown while sizes are symbols.
        """
        return T.Tensor((self.b, self.states_of, self.h, self.p, self.n), dtype)

    def scores(self, config: Config, spec: Spec) -> Any:
        """Return the type of scores: for each time and group those with the times of its chunk."""
        return T.Tensor((self.b, self.padded, self.g, config.chunk), spec.dtype)
