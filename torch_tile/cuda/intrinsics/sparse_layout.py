# SPDX-License-Identifier: Apache-2.0
"""Count the elements that a word of 2:4 metadata describes: TileLang's names for what T.gemm_sp reads."""

from __future__ import annotations

from typing import Any

from torch_tile.ir.dtype import ALL, DType, to_dtype
from torch_tile.language.sparse import NIBBLE, group_of

# Of each dtype: how many elements are kept of how many neighbours along K.
GROUP_CONFIG: dict[DType, tuple[int, int]] = {t: group_of(t) for t in ALL if t.bits in (8, 16, 32) and t.kind != "bool"}


def get_e_factor(a_dtype: Any, meta_dtype: Any) -> int:
    """Return how many elements of A along K one element of the metadata describes."""
    return to_dtype(meta_dtype).bits // NIBBLE * GROUP_CONFIG[to_dtype(a_dtype)][1]


def get_e_replicate_factor(a_dtype: Any) -> int:
    """Return how many threads in a row hold the same metadata for mma.sp: 2, or 1 for types of 8 bits."""
    return 1 if to_dtype(a_dtype).bits == 8 else 2


__all__ = ["GROUP_CONFIG", "get_e_factor", "get_e_replicate_factor"]
