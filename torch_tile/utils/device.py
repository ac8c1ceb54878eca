# SPDX-License-Identifier: Apache-2.0
"""The device of this machine, by TileLang's names."""

from __future__ import annotations

import os

from torch_tile.hardware import detected

IS_CUDA, IS_MPS, IS_NPU = bool(detected()), False, False


def get_current_device() -> str:
    """Return where kernels for "auto" run: "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if IS_CUDA else "cpu"


def device_synchronize() -> None:
    """Wait for what the GPU was given."""
    import torch

    if IS_CUDA:
        torch.cuda.synchronize()


def get_available_cpu_count() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["IS_CUDA", "IS_MPS", "IS_NPU", "device_synchronize", "get_available_cpu_count", "get_current_device"]
