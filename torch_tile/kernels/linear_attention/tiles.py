# SPDX-License-Identifier: Apache-2.0
"""What kernels of chunked linear attention share: tilings, tensor types, and the places of chunks.

A chunk is a run of times of one sequence. Sequences lie in a batch, or are packed into one after another; a table then
has the first time of each chunk and the number of its times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import LOG2_E, Machine, compute_dtype, dynamic, power_of_two, strided

HEADS = 8  # of a block that sums up decays
MOST_KEYS = 256


def most_keys(dtype: torch.dtype) -> int:
    """Return how many columns of a key a block can hold as rows of a state."""
    return MOST_KEYS // 4 if dtype == torch.float64 else MOST_KEYS


@dataclass(frozen=True)
class Config:
    """A tiling: chunks of `chunk` times.

    A state has `keys` rows, all that there are. Tiles have `value_tile` columns of V, and of K `key_tile`. A triangle
    is inverted from blocks of `base`. The gradients of keys, with the most sums at once, have `key_threads`.
    """

    chunk: int = 64
    keys: int = 128
    key_tile: int = 64
    value_tile: int = 32
    base: int = 16
    threads: int = 128
    key_threads: int = 128
    stages: int = 2


@dataclass(frozen=True)
class Spec:
    """Facts that the kernels are compiled for: dtypes, None for absent operands, and the form.

    `vector` divides K, V and the strides of rows. `packed` sequences have a table of chunks.
    """

    dtype: torch.dtype
    g: torch.dtype = torch.float32
    beta: torch.dtype = torch.float32
    initial: torch.dtype | None = None
    starts: torch.dtype | None = None
    vector: int = 1

    @property
    def compute(self) -> torch.dtype:
        """Return the dtype of sums and decays."""
        return compute_dtype(self.dtype)

    @property
    def packed(self) -> bool:
        """Return whether the sequences are packed into one."""
        return self.starts is not None


def config_for(dtype: torch.dtype, keys: int, machine: Machine) -> Config:
    """Choose chunks and tiles by the number of keys, at most `most_keys`."""
    rows = max(16, power_of_two(keys))
    if not machine.is_gpu:
        return Config(chunk=32, keys=rows, key_tile=min(64, rows), stages=1)
    tile = min(64, rows)
    if dtype == torch.float64:
        return Config(16, rows, min(32, rows), 16, stages=1)
    if dtype == torch.float32:
        wide = rows > 128  # shared memory is short
        return Config(16 if wide else 32, rows, min(32, rows), 16 if wide else 32, stages=1)
    wide = rows > 128
    return Config(64, rows, tile, 16 if wide else 32, key_threads=256, stages=1 if wide else 2)


class Sizes:
    """The run-time sizes of a call, and the types of its tensors."""

    def __init__(self, config: Config, spec: Spec) -> None:
        self.b, self.length, self.h, self.g = T.dynamic("b, length, h, g")
        self.k, self.v = (dynamic(name, spec.vector) for name in ("k", "v"))
        self.slots_of, self.sequences, self.starts_of = T.dynamic("slots_of, sequences, starts_of")
        self.config, self.spec = config, spec

    @property
    def slots(self) -> Any:
        """Return the number of chunks of a batch's row; packed, the most that there may be."""
        return self.slots_of - 1

    def keys(self, name: str) -> Any:
        """Return the type of a tensor `[B, L, G, K]`."""
        return strided(name, (self.b, self.length, self.g, self.k), self.spec.dtype, multiple=self.spec.vector)

    def values(self, name: str) -> Any:
        """Return the type of a tensor `[B, L, H, V]`."""
        return strided(name, (self.b, self.length, self.h, self.v), self.spec.dtype, multiple=self.spec.vector)

    def like_values(self) -> Any:
        """Return the type of a dense tensor `[B, L, H, V]`."""
        return T.Tensor((self.b, self.length, self.h, self.v), self.spec.dtype)

    def of_times(self) -> Any:
        """Return the type of numbers for each time, `[B, H, L]`."""
        return T.Tensor((self.b, self.h, self.length), self.spec.compute)

    def pairs(self) -> Any:
        """Return the type of numbers for each time with the times of its chunk, `[B, L, H, chunk]`."""
        return T.Tensor((self.b, self.length, self.h, self.config.chunk), self.spec.dtype)

    def states(self) -> Any:
        """Return the type of states, one for each chunk and one more, which no kernel writes or reads.

        A tensor of so many chunks would ask whether they are 1, which is unknown while sizes are symbols.
        """
        return T.Tensor((self.b, self.slots_of, self.h, self.k, self.v), self.spec.dtype)

    def table(self) -> list[Any]:
        """Return the type of the table of chunks, in a list that is empty without one."""
        return [T.Tensor((self.slots_of, 2), "int32")] if self.spec.packed else []

    def starts(self) -> list[Any]:
        """Return the type of the first times of packed sequences, in a list that is empty without them."""
        spec = self.spec
        return [] if spec.starts is None else [strided("starts", (self.starts_of,), spec.starts, unit=False)]


@T.macro
def place_of(s: Any, table: Any, slot: Any) -> Any:
    """Return the first time of a chunk and the number of its times."""
    if s.spec.packed:
        first, count = table[slot, 0], table[slot, 1]
    else:
        first = slot * s.config.chunk
        count = T.min(s.config.chunk, s.length - first)
    return first, count


@T.macro
def chunks_of(s: Any, starts: Any, sequence: Any) -> Any:
    """Return the row of the batch with a sequence, its first chunk and the number of its chunks.

    Packed sequences have room for one more chunk each than the times before them fill.
    """
    size = s.config.chunk
    if s.spec.packed:
        begin = T.min(T.max(T.cast(starts[sequence], "int32"), 0), s.length)
        end = T.min(T.max(T.cast(starts[sequence + 1], "int32"), begin), s.length)
        row, slot, count = 0, begin // size + sequence, T.ceildiv(end - begin, size)
    else:
        row, slot, count = sequence, 0, s.slots
    return row, slot, count


@T.macro
def store_rows(s: Any, tile: Any, out: Any, place: tuple[Any, ...]) -> None:
    """Store rows of a chunk to a tensor `[B, L, H, ...]`, but those of later sequences."""
    bz, first, count, head, column = place
    rows, columns = tile.shape
    if s.spec.packed:
        for i, j in T.Parallel(rows, columns):
            if i < count:
                out[bz, first + i, head, column + j] = T.cast(tile[i, j], out.dtype)
    else:
        T.copy(tile, out[bz, first : first + rows, head, column : column + columns])


@jit
def sum_decays(config: Config, spec: Spec) -> Any:
    """Build the kernel for decays from the start of each chunk, exponents of 2, and for betas, both `[B, H, L]`.

    For packed sequences it also writes the table of chunks.
    """
    s, compute, size = Sizes(config, spec), spec.compute, config.chunk

    @T.prim_func
    def linear_attention_sum_decays(
        g: strided("g", (s.b, s.length, s.h), spec.g, unit=False),
        beta: strided("beta", (s.b, s.length, s.h), spec.beta, unit=False),
        *others: [*s.starts(), *s.table()],
        decays: s.of_times(),
        betas: s.of_times(),
        slots: T.int32,
    ):
        with T.Kernel(T.ceildiv(s.h, HEADS), slots, s.b, threads=config.threads) as (bx, slot, bz):
            tile = T.alloc_shared((HEADS, size), compute)
            first = T.alloc_var("int32", 0)
            count = T.alloc_var("int32", 0)
            if spec.packed:
                for n in T.serial(s.starts_of - 1):
                    begin = T.min(T.max(T.cast(others[0][n], "int32"), 0), s.length)
                    end = T.min(T.max(T.cast(others[0][n + 1], "int32"), begin), s.length)
                    chunk = slot - (begin // size + n)
                    if T.logical_and(chunk >= 0, chunk * size < end - begin):
                        first = begin + chunk * size
                        count = T.min(size, end - first)
                if bx == 0:
                    for i in T.Parallel(2):
                        others[1][slot, i] = T.if_then_else(i == 0, first, count)
            else:
                first = slot * size
                count = T.min(size, s.length - first)
            for j, i in T.Parallel(size, HEADS):
                head, time = T.min(bx * HEADS + i, s.h - 1), T.min(first + j, s.length - 1)
                tile[i, j] = T.if_then_else(j < count, T.cast(g[bz, time, head], compute) * LOG2_E, 0.0)
                if j < count:
                    betas[bz, bx * HEADS + i, first + j] = T.cast(beta[bz, time, head], compute)
            T.cumsum(tile, dim=1)
            for i, j in T.Parallel(HEADS, size):
                if j < count:
                    decays[bz, bx * HEADS + i, first + j] = tile[i, j]

    return linear_attention_sum_decays
