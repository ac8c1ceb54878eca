# SPDX-License-Identifier: Apache-2.0
"""The tilings of kernels that work along one dimension: norms and softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch_tile.ir.layout import Digit, Layout
from torch_tile.kernels.common import Machine, power_of_two, power_within


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` rows by `width` elements. With `whole`, no row is longer than a tile, so each is read once.

    For GPUs: `lanes` neighbouring threads share a row, each taking `vector` elements at a time; rows of all operands
    start at multiples of `vector` elements. With `exact` every row has `width` elements, which saves all conditions;
    only where `vector` is more than 1, as a length that is known would promise that rows are aligned.
    """

    rows: int
    width: int
    whole: bool
    threads: int = 128
    lanes: int = 0
    vector: int = 1
    exact: bool = False

    @property
    def layout(self) -> Layout:
        """Return the layout of a tile. A row lies in as few threads as possible, so that reductions are short."""
        at_once = self.threads // self.lanes
        steps, pieces = self.rows // at_once, self.width // (self.vector * self.lanes)
        per_row = pieces * self.vector
        rows = (Digit(steps, per_row, "r"), Digit(at_once, self.lanes, "t"))
        return Layout((rows, (Digit(pieces, self.vector, "r"), Digit(self.lanes, 1, "t"), Digit(self.vector, 1, "r"))))


def config_for(n: int, vector: int, machine: Machine, wide: bool = False) -> Config:
    """Choose the tiling of rows of `n` elements, in vectors of `vector` elements, of 8 bytes if `wide`."""
    return _gpu_config(n, vector, 16 if wide else 64) if machine.is_gpu else _cpu_config(n)


def _cpu_config(n: int) -> Config:
    """Choose tiles of at most 32 KiB for the first-level cache. Short rows are taken several at once."""
    width = min(max(64, power_of_two(n)), 8192)
    return Config(rows=max(1, min(16, 1024 // width)), width=width, whole=n <= width)


def _gpu_config(n: int, vector: int, most: int) -> Config:
    """Choose tiles that hold a row in registers, about `most / 2` elements a thread. Longer rows come in pieces."""
    pieces = -(-n // vector)
    threads = next((t for t in (128, 256, 512) if n <= most // 2 * t), 512)
    wanted = pieces // 4 if vector > 1 else pieces // 16
    lanes = min(threads, max(1, power_within(wanted)))
    whole = n <= most * threads
    width = -(-pieces // lanes) * lanes * vector if whole else most // 2 * threads
    lanes = lanes if whole else threads
    return Config(threads // lanes, width, whole, threads, lanes, vector, vector > 1 and whole and n == width)
