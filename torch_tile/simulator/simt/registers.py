# SPDX-License-Identifier: Apache-2.0
"""Registers of each thread, and variables that keep one value for all threads as long as all agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torch_tile.diagnostics.errors import Span
from torch_tile.ir.buffer import Buffer
from torch_tile.simulator.memory import poisoned
from torch_tile.simulator.simt.memory import Memory, Threads
from torch_tile.simulator.simt.race_epochs import Array
from torch_tile.simulator.simt.values import Value, carrier, decode, encode, number


class Local(Memory):
    """Registers of each thread: `values[register, thread]`, not as they lie in memory but as numbers."""

    def __init__(self, buffer: Buffer, size: int, threads: Threads):
        super().__init__(buffer, size, threads)
        self.values = np.zeros((size, threads.lanes), carrier(buffer.dtype))
        self.poison = poisoned((1,), buffer.dtype).to(torch.float64 if buffer.dtype.is_float else torch.int64).numpy()
        self.reset()

    def reset(self) -> None:
        """Undefined content, for the running threads."""
        where = slice(None) if self.threads.mask is None else self.threads.mask
        self.values[:, where] = self.poison.astype(self.values.dtype)

    def load(self, index: Value, span: Span | None) -> Value:
        """One element for each running thread."""
        if isinstance(index, np.ndarray):
            ids = self.threads.active()
            found = self.values[np.clip(self._checked(index[ids], span), 0, self.size - 1), ids]
            return self.threads.spread(found, ids)
        if not 0 <= index < self.size:
            self.inside(np.array([index]), 1, span)
            index = 0
        return self.values[index].copy()

    def store(self, index: Value, value: Value, span: Span | None) -> None:
        """One element by each running thread."""
        mask = self.threads.mask
        if isinstance(index, np.ndarray):
            ids = self.threads.active()
            ok = self.inside(index[ids], 1, span)
            ids = ids if ok is None else ids[ok]
            self.values[index[ids], ids] = self.threads.each(value, ids)
        elif not 0 <= index < self.size:
            self.inside(np.array([index]), 1, span)
        elif mask is None:
            self.values[index] = value
        else:
            self.values[index, mask] = value[mask] if isinstance(value, np.ndarray) else value

    def _checked(self, index: Array, span: Span | None) -> Array:
        self.inside(index, 1, span)
        return index

    def rows(self, index: Array, count: int, ids: Array, span: Span | None) -> Array:
        """`count` registers from each index on, raw."""
        self.inside(index, count, span)
        places = np.clip(index[:, None] + np.arange(count), 0, self.size - 1)
        return encode(self.values[places, ids[:, None]], self.dtype)

    def put_rows(self, index: Array, raw: Array, ids: Array, span: Span | None) -> None:
        """Overwrite registers from each index on."""
        ok = self.inside(index, raw.shape[1], span)
        if ok is not None:
            index, raw, ids = index[ok], raw[ok], ids[ok]
        self.values[index[:, None] + np.arange(raw.shape[1]), ids[:, None]] = decode(raw, self.dtype)

    def fragment(self, start: int, count: int) -> Array:
        """Registers of whole warps, `[warps, 32, count]`."""
        return self.values[start : start + count].reshape(count, -1, 32).transpose(1, 2, 0)

    def put_fragment(self, start: int, values: Array, warps: Sequence[bool] | Array) -> None:
        """Overwrite registers of the chosen warps."""
        count = values.shape[2]
        target = self.values[start : start + count].reshape(count, -1, 32)
        target[:, warps] = values[warps].transpose(2, 0, 1)


class Variable(Memory):
    """A T.alloc_var: one value for all threads until they assign different ones."""

    def __init__(self, buffer: Buffer, threads: Threads):
        super().__init__(buffer, 1, threads)
        self.reset()

    def reset(self) -> None:
        """Undefined content."""
        self.value: Value = number(poisoned((), self.dtype).item(), self.dtype)

    def load(self, index: Value, span: Span | None) -> Value:
        """The value."""
        return self.value

    def store(self, index: Value, value: Value, span: Span | None) -> None:
        """Assign by the running threads."""
        mask = self.threads.mask
        if mask is None or mask is self.threads.everyone:
            self.value = value
        else:
            self.assign(mask, value)

    def assign(self, mask: Array, value: Value) -> None:
        """Assign by the threads of `mask`."""
        self.value = np.asarray(np.where(mask, value, self.value), carrier(self.dtype))
