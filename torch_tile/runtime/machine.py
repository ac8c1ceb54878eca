# SPDX-License-Identifier: Apache-2.0
"""Describe the machine that runs a kernel, which need not be the one that tensors lie on: plans name another one.

Entry functions choose tilings by it, and ask it for their kernels. Inside `planning` it records what they launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_tile.hardware import Target
from torch_tile.runtime.launch_plan import current_plan

if TYPE_CHECKING:
    from torch_tile.jit import JITFunction


@dataclass(frozen=True)
class Machine:
    """A target, and the blocks of work that it does at once: threads of a CPU, multiprocessors of a GPU."""

    target: Target
    num_sms: int

    @property
    def is_gpu(self) -> bool:
        """Return whether kernels are cut for a GPU."""
        return self.target.kind == "cuda"

    def kernel(self, function: JITFunction) -> Callable[..., Any]:
        """Compile a kernel function for this machine. Inside `planning`, calls of its kernels are recorded instead."""
        plan, compiled = current_plan(), function.on(self.target)
        return compiled if plan is None else plan.noting(compiled)
