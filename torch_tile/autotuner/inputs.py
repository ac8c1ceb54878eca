# SPDX-License-Identifier: Apache-2.0
"""Tensors that kernels are tried on, so that nothing of the caller's changes: neither tensors nor the random stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch_tile.ir.stmt import Program
from torch_tile.lowering.pipelining.copy_plan import uses

SEED = 0  # every configuration, and every process, is tried on the same numbers


def written(program: Program) -> set[int]:
    """Identities of the buffers that a program writes."""
    return {id(buffer) for kernel in program.kernels for buffer in uses(kernel.body)[1]}


def spare(value: Any) -> Any:
    """A copy of a tensor with its strides; anything else, and a tensor that overlaps itself, as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    try:
        return made.copy_(value.detach())
    except RuntimeError:  # several elements in one place
        return value


@contextlib.contextmanager
def made_by_seed() -> Iterator[None]:
    """Random numbers made inside are always the same; the caller's stream goes on as if there had been none."""
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(SEED)
        yield
