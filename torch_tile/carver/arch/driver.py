# SPDX-License-Identifier: Apache-2.0
"""Properties of this machine's GPU by TileLang's names; without a GPU, those of a target's typical board."""

from __future__ import annotations

from typing import Any

from torch_tile.autotuner.machine import num_sms_of
from torch_tile.hardware import FALLBACK_ARCH, Target, detected


def _gpu() -> Target:
    """Return the target of the GPU, or a fallback without one."""
    return Target("cuda", detected() or FALLBACK_ARCH)


def get_num_sms(device_id: int = 0) -> int:
    """Return the number of multiprocessors of the GPU: blocks of a persistent kernel."""
    properties = get_cuda_device_properties(device_id)
    return num_sms_of(_gpu()) if properties is None else int(properties.multi_processor_count)


def get_device_name(device_id: int = 0) -> str:
    """Return the GPU's name; without a GPU, that of the architecture."""
    properties = get_cuda_device_properties(device_id)
    return _gpu().arch if properties is None else str(properties.name)


def get_max_dynamic_shared_size_bytes(device_id: int = 0) -> int:
    """Return the bytes of shared memory that one block may ask for."""
    return _gpu().chip.shared_limit


get_shared_memory_per_block = get_max_dynamic_shared_size_bytes


def get_registers_per_block(device_id: int = 0) -> int:
    """Return the 32-bit registers that one block may have."""
    return 65536


def get_cuda_device_properties(device_id: int = 0) -> Any:
    """Return torch's properties of the GPU; None without one."""
    import torch

    return torch.cuda.get_device_properties(device_id) if torch.cuda.is_available() else None


__all__ = [
    "get_cuda_device_properties", "get_device_name", "get_max_dynamic_shared_size_bytes", "get_num_sms",
    "get_registers_per_block", "get_shared_memory_per_block",
]  # fmt: skip
