# SPDX-License-Identifier: Apache-2.0
"""Machines as templates ask for them: limits of a target, and of the GPU that is there (driver.py)."""

from __future__ import annotations

from torch_tile.autotuner.machine import num_sms_of
from torch_tile.carver.arch import driver as driver
from torch_tile.hardware import Target


class TileDevice:
    """A machine that kernels are tiled for. `target` is any spelling that torch_tile.Target.of takes."""

    kind = ""

    def __init__(self, target: object = "auto"):
        self.target: Target = Target.of(target)
        if self.kind and self.target.kind != self.kind:
            raise ValueError(f"{type(self).__name__} takes no target of the kind {self.target.kind!r}")
        self.compute_max_core: int = num_sms_of(self.target)
        self.warp_size = 32
        self.smem_cap: int = self.target.chip.shared_limit
        self.platform: str = self.target.kind.upper()


class CUDA(TileDevice):
    """An NVIDIA GPU: `CUDA("cuda")`, `CUDA("cuda -arch=sm_90a")`."""

    kind = "cuda"

    def __init__(self, target: object = "cuda"):
        super().__init__(target)
        self.sm_version: int = self.target.capability


class CPU(TileDevice):
    """A CPU."""

    kind = "cpu"

    def __init__(self, target: object = "cpu"):
        super().__init__(target)


class CDNA(TileDevice):
    """A GPU of AMD's: TileError, as this compiler has no such target."""

    def __init__(self, target: object = "hip"):
        super().__init__(target)


def get_arch(target: object = "auto") -> TileDevice:
    """Return the machine of a target. Raises TileError for machines that are not supported."""
    return CUDA(target) if Target.of(target).kind == "cuda" else CPU(target)


auto_infer_current_arch = get_arch

__all__ = ["CDNA", "CPU", "CUDA", "TileDevice", "auto_infer_current_arch", "driver", "get_arch"]
