# SPDX-License-Identifier: Apache-2.0
"""Questions about targets, by TileLang's names."""

from __future__ import annotations

from torch_tile.hardware import Target, detected


def determine_target(target: object = "auto", return_object: bool = False) -> Target | str:
    """Return the target that a spelling means: its name, or with `return_object` a torch_tile.Target.

    Raises TileError for machines that are not supported.
    """
    found = Target.of(target)
    return found if return_object else str(found)


def check_cuda_availability() -> bool:
    """Return whether there is a GPU."""
    return bool(detected())


def target_is_cuda(target: object) -> bool:
    """Return whether a target is a GPU of NVIDIA's."""
    return Target.of(target).kind == "cuda"


def _is(target: object, least: int, most: int) -> bool:
    """Return whether a target is a GPU within these capabilities."""
    found = Target.of(target)
    return found.kind == "cuda" and least <= found.capability <= most


def target_is_ampere(target: object) -> bool:
    """Return whether a target is sm_80 to sm_89."""
    return _is(target, 80, 89)


def target_is_hopper(target: object) -> bool:
    """Return whether a target is sm_90a."""
    return _is(target, 90, 90)


def target_is_sm120(target: object) -> bool:
    """Return whether a target is sm_120 or sm_121."""
    return _is(target, 120, 129)


def target_has_bulk_copy(target: object) -> bool:
    """Return whether a target has bulk copies by tensor maps."""
    return Target.of(target).has_tma


__all__ = [
    "check_cuda_availability", "determine_target", "target_has_bulk_copy", "target_is_ampere", "target_is_cuda",
    "target_is_hopper", "target_is_sm120",
]  # fmt: skip
