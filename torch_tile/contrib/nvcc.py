# SPDX-License-Identifier: Apache-2.0
"""Questions about a GPU's compute capability, by TileLang's names. This compiler needs no nvcc."""

from __future__ import annotations

from torch_tile.hardware import Target


def get_target_compute_version(target: object = None) -> str:
    """Return the compute capability of a target, or of this machine's GPU, as "9.0". Raises ValueError for a CPU."""
    found = Target.of("auto" if target is None else target)
    if found.kind != "cuda":
        raise ValueError("there is no GPU whose compute capability could be told; give a target, as 'cuda:sm_90a'")
    return f"{found.capability // 10}.{found.capability % 10}"


def get_cuda_version(cuda_path: str | None = None) -> tuple[int, int]:
    """Return the version of CUDA that kernels are compiled by, NVRTC's, as (13, 0). `cuda_path` has no effect."""
    from torch_tile.runtime.nvrtc import nvrtc_version

    return nvrtc_version()


def get_target_arch(compute_version: str) -> str:
    """Return the assembler's name of a chip: "90a" for "9.0"."""
    return _target_of(compute_version).arch.removeprefix("sm_")


def parse_compute_version(compute_version: str) -> tuple[int, int]:
    """Parse a compute version: (9, 0) for "9.0"."""
    major, _, minor = compute_version.partition(".")
    return int(major), int(minor or 0)


def _target_of(compute_version: str) -> Target:
    """Return the target of a compute version."""
    major, minor = parse_compute_version(compute_version)
    return Target("cuda", 10 * major + minor)


def have_bf16(compute_version: str) -> bool:
    """Return whether the chip computes with bfloat16: from 8.0 on."""
    return parse_compute_version(compute_version) >= (8, 0)


def have_fp8(compute_version: str) -> bool:
    """Return whether the chip has fp8: from 8.9 on."""
    return _target_of(compute_version).has_fp8


def have_tma(target: object) -> bool:
    """Return whether a target has bulk copies by tensor maps."""
    return Target.of(target).has_tma


def have_pdl(target: object) -> bool:
    """Return whether a kernel may start before its predecessor ends (programmatic dependent launch): from 9.0 on."""
    return Target.of(target).has_early_start


def is_hopper(target: object) -> bool:
    """Return whether a target is sm_90a."""
    return Target.of(target).has_wgmma


__all__ = [
    "get_cuda_version", "get_target_arch", "get_target_compute_version", "have_bf16", "have_fp8", "have_pdl",
    "have_tma", "is_hopper", "parse_compute_version",
]  # fmt: skip
