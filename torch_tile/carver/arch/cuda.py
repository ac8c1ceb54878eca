# SPDX-License-Identifier: Apache-2.0
"""Questions about NVIDIA's GPUs, by TileLang's names: which generation an architecture is."""

from __future__ import annotations

import re

from torch_tile.carver.arch import CUDA, TileDevice


def check_sm_version(arch: str) -> int:
    """Return the number of an architecture, 90 for "sm_90a"; -1 for text that names none of NVIDIA's."""
    found = re.fullmatch(r"(?:sm_)?(\d+)[a-z]?", arch)
    return int(found[1]) if found else -1


def _is(arch: TileDevice, least: int, most: int) -> bool:
    """Return whether a machine is a GPU within these capabilities."""
    return isinstance(arch, CUDA) and least <= arch.sm_version <= most


def is_volta_arch(arch: TileDevice) -> bool:
    """Return whether a machine is sm_70 or sm_72."""
    return _is(arch, 70, 74)


def is_ampere_arch(arch: TileDevice) -> bool:
    """Return whether a machine is sm_80 to sm_87."""
    return _is(arch, 80, 88)


def is_ada_arch(arch: TileDevice) -> bool:
    """Return whether a machine is sm_89."""
    return _is(arch, 89, 89)


def is_hopper_arch(arch: TileDevice) -> bool:
    """Return whether a machine is sm_90."""
    return _is(arch, 90, 90)


def has_mma_support(arch: TileDevice) -> bool:
    """Return whether a machine has the products of sm_80 and later, which this compiler uses."""
    return _is(arch, 80, 1 << 16)


__all__ = [
    "CUDA", "check_sm_version", "has_mma_support", "is_ada_arch", "is_ampere_arch", "is_hopper_arch", "is_volta_arch",
]  # fmt: skip
