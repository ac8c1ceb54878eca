# SPDX-License-Identifier: Apache-2.0
"""The machine that kernels are tuned on: its name, its size, its presence, and its compilers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch_tile.compiler.source_cache import PARTS
from torch_tile.hardware import Target, detected
from torch_tile.runtime.cache import key_of
from torch_tile.runtime.host_compiler import find_compiler, headers_digest
from torch_tile.runtime.nvrtc import find_nvrtc
from torch_tile.runtime.source_digest import source_digest


def can_measure(target: Target) -> bool:
    """Return whether kernels for `target` can be timed now: the GPU is present, and no CUDA graph is being captured."""
    if target.kind == "cpu":
        return True
    import torch

    return detected() == target.capability and not torch.cuda.is_current_stream_capturing()


def num_sms_of(target: Target) -> int:
    """Return the number of SMs of the GPU, or of threads of the CPU."""
    import torch

    if target.kind == "cpu":
        return torch.get_num_threads()
    if detected() == target.capability:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return target.sms


def device_name(target: Target) -> str:
    """Name the machine that a result holds for: the GPU; for the CPU, its number of threads."""
    import torch

    return f"{num_sms_of(target)} threads" if target.kind == "cpu" else torch.cuda.get_device_name()


def surroundings(target: Target) -> tuple[str, ...]:
    """Collect the facts that decide how a program is compiled for a target."""
    compiler = find_nvrtc().identity if target.kind == "cuda" else find_compiler().identity
    return str(target), compiler, own_text()


def own_text() -> str:
    """Return a digest of the compiler's own source, as measurements with another source do not apply. Measurements with
    another source do not apply.
    """
    return key_of(headers_digest(), source_digest("autotuner", *PARTS))


def synchronize(target: Target) -> None:
    """Wait for the GPU; raises if a kernel has made it unusable for this process."""
    if target.kind == "cuda":
        import torch

        torch.cuda.synchronize()


def on_device(tensors: Sequence[Any]) -> AbstractContextManager[Any]:
    """Make the GPU of the tensors the current one inside."""
    import torch

    device = next((t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda), None)
    return nullcontext() if device is None else torch.cuda.device(device)
