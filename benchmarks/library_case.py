# SPDX-License-Identifier: Apache-2.0
"""What the catalogue of library.py holds: calls of entry functions, for each dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FLOATS = HALVES | {"fp32": torch.float32}
ALL = FLOATS | {"fp64": torch.float64}
Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A call of an entry function: `call(make)` makes its tensors by `make(shape, dtype)`."""

    name: str
    call: Callable[[Make], object]
