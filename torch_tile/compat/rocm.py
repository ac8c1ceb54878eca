# SPDX-License-Identifier: Apache-2.0
"""TileLang's `rocm.target`: there is no GPU of AMD's for this compiler."""

from __future__ import annotations

from typing import Any

from torch_tile.compat.absent import absent


def check_hip_availability() -> bool:
    """Return whether there is a GPU of AMD's: False, as nothing is compiled for one."""
    return False


def __getattr__(name: str) -> Any:
    """Return what stands for another question about such GPUs: its use is an error."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return absent(f"tilelang.rocm.target.{name}")


__all__ = ["check_hip_availability"]
