# SPDX-License-Identifier: Apache-2.0
"""What a kernel is compiled for. Features are asked for by name, never by comparing versions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_tile.diagnostics.errors import error
from torch_tile.registers import most_blocks

if TYPE_CHECKING:
    import torch

CPU_SPELLINGS = ("cpu", "c", "llvm", "host")
# "sm_90" means sm_90a: without the "a" the chip's own instructions are missing.
ARCHES = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
MOST_BLOCKS = 32  # of a multiprocessor
MOST_THREADS = 1024  # of a block
GRID_LIMITS = (2**31 - 1, 65535, 65535)  # blocks of a grid in x, y and z
RESERVED = 1024  # bytes of shared memory that each block takes beside its own
FALLBACK_ARCH = 90  # what "cuda" means on a machine that has no GPU: kernels can be compiled, not run


@dataclass(frozen=True)
class Target:
    """A machine to compile for: `kind` is "cpu" or "cuda"; `capability` is 80, 89, 90, 120, ... for CUDA."""

    kind: str = "cpu"
    capability: int = 0

    @classmethod
    def of(cls, target: object = "auto") -> Target:
        """From a name: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:sm_90a", "cuda -arch=sm_80", "sm_120".

        Raises TileError for names of other machines.
        """
        if isinstance(target, Target):
            return target
        if isinstance(target, dict):  # TileLang's {"kind": "cuda", "arch": "sm_90"}
            target = f"{target.get('kind', 'auto')}:{target.get('arch', '')}".rstrip(":")
        text = str(target).strip().lower()
        if text in ("", "auto"):
            found = detected()
            return cls("cuda", found) if found else cls("cpu")
        if text.split()[0] in CPU_SPELLINGS:
            return cls("cpu")
        if text.startswith(("cuda", "sm_", "nvidia")):
            return cls("cuda", _capability(text) or detected() or FALLBACK_ARCH)
        if text.startswith(("hip", "metal", "webgpu", "cutedsl")):
            fix = "compile for target='cuda' or target='cpu'"
            raise error("unsupported_on_target", None, what="code generation", target=text, fix=fix)
        fix = "give 'cpu', 'cuda', 'cuda:sm_90a' or 'auto'"
        raise error("bad_argument", None, op="Target", name="target", why=f"is {target!r}", fix=fix)

    @classmethod
    def of_device(cls, device: torch.device) -> Target:
        """The target whose kernels run on a device of torch: its own chip's for a GPU, else the CPU's."""
        return cls("cuda", _capability_of(device.index)) if device.type == "cuda" else cls("cpu")

    @property
    def arch(self) -> str:
        """What the assembler calls it, "sm_90a"; "" for the CPU."""
        return ARCHES.get(self.capability, f"sm_{self.capability}") if self.kind == "cuda" else ""

    @property
    def has_stmatrix(self) -> bool:
        """Whether stmatrix exists."""
        return self.capability >= 90

    @property
    def has_fp8(self) -> bool:
        """Whether fp8 conversions and mma.sync on fp8 exist."""
        return self.capability >= 89

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that one block may ask for."""
        return {80: 163, 86: 99, 89: 99, 120: 99}.get(self.capability, 227) * 1024

    @property
    def thread_limit(self) -> int:
        """Threads that a multiprocessor runs at the same time."""
        return {86: 1536, 89: 1536, 120: 1536}.get(self.capability, 2048)

    def blocks_at_once(self, threads: int, registers: int, shared_bytes: int) -> int:
        """How many blocks of so many threads, each with so many registers, a multiprocessor runs at the same time."""
        by_shared = (self.shared_limit + RESERVED) // (shared_bytes + RESERVED)
        by_registers = most_blocks(threads, registers)
        return min(by_shared, by_registers, self.thread_limit // threads, MOST_BLOCKS)

    def __str__(self) -> str:
        return f"cuda:{self.arch}" if self.kind == "cuda" else self.kind


def _capability(text: str) -> int:
    digits = "".join(c for c in text.partition("sm_")[2] if c.isdigit())
    return int(digits) if digits else 0


@functools.cache
def _capability_of(index: int | None) -> int:
    """The compute capability of a GPU of this machine."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def detected() -> int:
    """The compute capability of the current GPU as one number (90 for 9.0); 0 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return _capability_of(torch.cuda.current_device())
