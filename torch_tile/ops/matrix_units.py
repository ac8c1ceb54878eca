# SPDX-License-Identifier: Apache-2.0
"""Leave products of bf16 to torch on a CPU with AMX, for which our CPU kernels have no instructions.

oneDNN applies bias and activation in float32 and rounds once, as our kernels do.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

from torch_tile.runtime.launch_plan import current_plan

ACTIVATIONS: Final[dict[str, tuple[str, list[float], str | None]]] = {
    "none": ("none", [], None), "relu": ("relu", [], None), "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"), "silu": ("swish", [], None),
}  # fmt: skip
"""An activation by oneDNN's name, scalars and algorithm."""


@functools.cache
def torch_has_matrix_units() -> bool:
    """Return whether torch multiplies bf16 on this CPU by AMX."""
    return bool(torch.cpu._is_amx_tile_supported()) and torch.backends.mkldnn.is_available()


def is_left_to_torch(x: Tensor) -> bool:
    """Return whether torch's own product of x is the faster one: of bf16 on a CPU with AMX, outside of plans."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or not torch_has_matrix_units():
        return False
    return current_plan() is None and x.numel() > 0
