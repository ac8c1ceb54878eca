# SPDX-License-Identifier: Apache-2.0
"""What programs after reported kinds of faults share: their form, and tensors whose sums are exact."""

from typing import Any

import torch

Case = tuple[Any, list[Any], dict[int, torch.Tensor]]  # a kernel, arguments, what some of them hold afterwards


def whole(*shape: int, dtype: torch.dtype = torch.float32, most: int = 4) -> torch.Tensor:
    """Whole numbers, whose sums and products are exact."""
    least = 0 if dtype in (torch.uint8, torch.bool) else -most
    return torch.randint(least, most + 1, shape).to(dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor for results."""
    return torch.zeros(*shape, dtype=dtype)
