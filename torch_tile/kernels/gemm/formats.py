# SPDX-License-Identifier: Apache-2.0
"""4-bit formats decoded by a table, and scales that are powers of two.

A code is an index of the format's 16 numbers. A weight is such a number times the scale of its block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.ir import dtype as dt
from torch_tile.ir.dtype import rounded

BITS = 4  # of a code
LANES = 32  # of a warp: each reads a bank of shared memory of its own
TABLE = 256 * LANES * 2  # numbers of a table of all pairs of codes, in a copy for each lane
QUIET = 0x400000  # the highest bit of a float32's mantissa: 2^-127 alone, NaN with all bits of the exponent
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn  # scales of MXFP4, and of NVFP4


@dataclass(frozen=True)
class Format:
    """A 4-bit number format: its 16 values by code, exact in float32, and the dtype of its block scales."""

    values: tuple[float, ...]
    scale: torch.dtype = torch.float32

    @property
    def largest(self) -> float:
        """Return the largest magnitude, which the scale of a block maps its largest weight to."""
        return max(map(abs, self.values))

    @property
    def unit(self) -> float:
        """Return the least power of two that no magnitude exceeds."""
        return 2.0 ** math.ceil(math.log2(self.largest))

    def table(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the numbers as a tensor `[16]`."""
        return torch.tensor(self.values, dtype=dtype, device=device)


def _signed(sizes: tuple[float, ...], **options: Any) -> Format:
    """Build a 16-value table from 8 magnitudes; the upper bit is the sign."""
    return Format((*sizes, *(-size for size in sizes)), **options)


def _single(values: tuple[float, ...]) -> tuple[float, ...]:
    """Round numbers to float32, without torch: a trace may import this module, and would record a tensor's numbers."""
    return tuple(rounded(value, dt.float32) for value in values)


FORMATS = {
    # Quantiles of the normal distribution (QLoRA, arXiv:2305.14314, appendix E).
    "nf4": Format(_single((
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ))),
    # What bitsandbytes calls FP4: twelfths, in an order of its own.
    "fp4": _signed(_single(tuple(x / 12 for x in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)))),
    # e2m1 of the OCP Microscaling Formats (MX) specification 1.0, section 5.3.3: of MXFP4.
    "e2m1": _signed((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), scale=E8M0),
}  # fmt: skip
"""Formats by name: what `format` of `tile.dequant_gemm` may be, besides the empty string."""


def value_of(name: str, word: Any, byte: Any, upper: Any, unit: float = 1.0) -> Any:
    """Look up the number over `unit`, a float32, of 4 bits of a word, in a kernel (see `T.nibble`)."""
    return T.table_nibble(word, byte, upper, tuple(value / unit for value in FORMATS[name].values))


@T.macro
def pairs_of(name: str, high_first: bool, dtype: torch.dtype, unit: float = 1.0) -> Any:
    """Fill a table of shared memory with the two numbers of each byte, over `unit`.

    Each lane has a copy (see `T.table_place`). A byte costs 7 instructions by registers alone, and 3 by such a table:
    two that make the address, and the load.
    """
    table = T.alloc_shared((TABLE,), dtype)
    for i in T.Parallel(TABLE):
        table[i] = T.cast(value_of(name, i // (2 * LANES), 0, 1 - i % 2 if high_first else i % 2, unit), dtype)
    return table


def power_of(code: Any, byte: int = 0) -> Any:
    """Decode a byte of float8_e8m0fnu, or of an int32 of four, as float32, in a kernel: a power of two; NaN for 255."""
    code = (code >> 8 * byte) & 255 if code.dtype == "int32" else T.cast(code, "int32")
    word = T.max(code << 23, QUIET) | ((code + 1) >> 8) * QUIET  # without branches: 2^-127 for 0, NaN for 255
    return T.float_from_bits(word, 0x7FFFFFFF, 0)
