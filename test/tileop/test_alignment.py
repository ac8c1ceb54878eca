# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.layout import Digit, Layout, row_major, shared_tile
from torch_tile.tileop.alignment import aligned_run


@pytest.mark.parametrize(
    ("shape", "layout", "run"),
    [
        ((64, 64), shared_tile((64, 64), 16), 8),  # the swizzle moves 16 bytes
        ((3, 32, 16), shared_tile((3, 32, 16), 32), 4),
        ((9, 65), row_major((9, 65)), 65),
        ((9, 72), None, 72),
        ((4, 8), Layout(((Digit(4, 12, "m"),), (Digit(8, 1, "m"),))), 4),  # rows of 8, 12 apart
        ((8, 8), Layout(((Digit(8, 1, "m"),), (Digit(8, 8, "m"),))), 1),
    ],
)
def test_runs(on_threads, shape, layout, run: int) -> None:
    assert aligned_run(on_threads.buffer("x", shape, dt.float16, "shared", layout)) == run
