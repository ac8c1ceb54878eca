# SPDX-License-Identifier: Apache-2.0
"""Properties of this machine's GPU by TileLang's names; without a GPU, those of a target's typical board."""

from __future__ import annotations

from typing import Any

from torch_tile.autotuner.machine import num_sms_of
from torch_tile.hardware import FALLBACK_ARCH, Target, detected

__path__: list[str] = []  # TileLang's module of this name has modules inside: compat


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


# Attributes by the numbers of NVIDIA's driver.
SHARED_MEMORY_OF_BLOCK, SHARED_MEMORY_OF_MULTIPROCESSOR, PERSISTING_L2 = 8, 81, 108


def get_device_attribute(attr: int, device_id: int = 0) -> int:
    """Return an attribute of a GPU by its number, as cudaDeviceGetAttribute does. Raises LaunchError without a GPU."""
    from torch_tile.runtime.driver import driver

    return driver().attribute(attr, device_id)


def get_max_dynamic_shared_size_bytes(device_id: int = 0) -> int:
    """Return the bytes of shared memory of a multiprocessor; without a GPU, those that one block may ask for."""
    if get_cuda_device_properties(device_id) is None:
        return _gpu().chip.shared_limit
    return get_device_attribute(SHARED_MEMORY_OF_MULTIPROCESSOR, device_id)


def get_shared_memory_per_block(device_id: int = 0) -> int:
    """Return the bytes of shared memory that one block has without asking for more; without a GPU, the most it may."""
    if get_cuda_device_properties(device_id) is None:
        return _gpu().chip.shared_limit
    return get_device_attribute(SHARED_MEMORY_OF_BLOCK, device_id)


def get_persisting_l2_cache_max_size(device_id: int = 0) -> int:
    """Return the bytes of the L2 cache that can be kept for chosen data; 0 without a GPU."""
    return 0 if get_cuda_device_properties(device_id) is None else get_device_attribute(PERSISTING_L2, device_id)


def get_registers_per_block(device_id: int = 0) -> int:
    """Return the 32-bit registers that one block may have."""
    return 65536


def get_cuda_device_properties(device_id: int = 0) -> Any:
    """Return torch's properties of the GPU; None without one."""
    import torch

    return torch.cuda.get_device_properties(device_id) if torch.cuda.is_available() else None


__all__ = [
    "get_cuda_device_properties", "get_device_attribute", "get_device_name", "get_max_dynamic_shared_size_bytes",
    "get_num_sms", "get_persisting_l2_cache_max_size", "get_registers_per_block", "get_shared_memory_per_block",
]  # fmt: skip
