# SPDX-License-Identifier: Apache-2.0
"""A model of how wgmma reads operands from shared memory, written down from the instruction set's definition alone."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from torch_tile.intrinsics.wgmma import Descriptor
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.layout import row_major


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Shared memory that holds one buffer, at an address that is a multiple of 1024: which element each place holds."""

    buffer: Buffer
    places: dict[int, tuple[int, ...]]

    @staticmethod
    def holding(buffer: Buffer) -> Hardware:
        """Every element at the byte where the layout puts it."""
        layout, size = buffer.layout or row_major(buffer.static_shape), buffer.dtype.itemsize
        indices = itertools.product(*map(range, buffer.static_shape))
        return Hardware(buffer, {layout.apply(index)["m"] * size: index for index in indices})

    def start(self, indices: tuple[int, ...]) -> int:
        """The byte of an element without the swizzle, which is 0 in the first row of a pattern."""
        layout = self.buffer.layout or row_major(self.buffer.static_shape)
        return dataclasses.replace(layout, swizzle=None).apply(indices)["m"] * self.buffer.dtype.itemsize

    def matrix(self, start: int, walk: Descriptor, rows: int, k: int) -> np.ndarray:
        """The elements that an instruction finds, `[rows, k, rank]`: `rows` of A, or columns of B."""
        size = self.buffer.dtype.itemsize
        found = np.zeros((rows, k, self.buffer.rank), int)
        for i, j in itertools.product(range(rows), range(k)):
            if walk.across:
                panel = walk.swizzle // size
                at = i // panel * walk.leading + j // 8 * walk.stride + j % 8 * walk.swizzle + i % panel * size
            else:
                at = i // 8 * walk.stride + i % 8 * walk.swizzle + j * size
            address = start + at
            address ^= (address >> 7 & {128: 7, 64: 3, 32: 1}[walk.swizzle]) << 4  # absolute bits
            found[i, j] = self.places[address]
        return found
