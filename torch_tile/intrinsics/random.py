# SPDX-License-Identifier: Apache-2.0
"""Philox 4x32-10: 32 random bits that follow from a counter and a key alone.

The C++ is in csrc/cuda_random.h and csrc/cpu_random.h.
"""

from __future__ import annotations

from typing import Any

from torch_tile.intrinsics.base import Intrinsic, declare
from torch_tile.ir import dtype as dt

NAME = "philox_word"
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)  # from a round's key to the next one's
_WORD = 0xFFFFFFFF


def _evaluate(place: Any, *words: Any) -> Any:
    """Compute one word of the counter-based random generator (Philox), for a counter of four words and a key of two."""
    import torch

    place, a, b, c, d, k, m = torch.broadcast_tensors(*((w.long() & _WORD) for w in (place, *words)))
    for _ in range(ROUNDS):
        (first, low), (second, below) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
        a, b, c, d = second ^ b ^ k, below, first ^ d ^ m, low
        k, m = (k + STEPS[0]) & _WORD, (m + STEPS[1]) & _WORD
    return torch.where(place == 0, a, torch.where(place == 1, b, torch.where(place == 2, c, d)))


def _product(a: Any, factor: int) -> tuple[Any, Any]:
    """Return the upper and lower word of a product, by halves, so that nothing leaves 63 bits."""
    low, high = a * (factor & 0xFFFF), a * (factor >> 16)
    upper = (high + (low >> 16)) >> 16
    return upper & _WORD, (low + (high << 16)) & _WORD


declare(
    Intrinsic(
        NAME, 7, lambda args: (dt.uint32, dt.uint32), NAME, _evaluate, cuda=NAME, header="cuda_random.h",
    )
)  # fmt: skip
