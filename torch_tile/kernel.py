# SPDX-License-Identifier: Apache-2.0
"""A compiled kernel as its user holds it: callable, and open to inspection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .ir.stmt import Program
from .profiler import Profiler, TensorSupplyType
from .runtime.launch import Launcher
from .target import Target


class JITKernel:
    """Call it with the tensors and scalars of the kernel's signature (without those of out_idx)."""

    def __init__(self, program: Program, lowered: Program, source: str, launcher: Launcher, target: Target):
        self.program, self.lowered, self.source = program, lowered, source
        self.launcher, self.target = launcher, target
        self.__name__ = program.name

    def __call__(self, *args: Any) -> Any:
        """Run the kernel; raises LaunchError for arguments that it cannot take."""
        return self.launcher(*args)

    def __repr__(self) -> str:
        return f"<JITKernel {self.__name__} for {self.target}>"

    @property
    def params(self) -> tuple[Any, ...]:
        """Buffers and scalars of the signature."""
        return self.program.params

    @property
    def out_idx(self) -> list[int]:
        """Positions of the parameters that the kernel allocates."""
        return self.launcher.out_idx

    def script(self) -> str:
        """The kernel in the language, as traced."""
        return repr(self.program)

    def get_kernel_source(self, kernel_only: bool = True) -> str:
        """The generated C++."""
        return self.source

    def get_host_source(self) -> str:
        """The generated C++; on the CPU, host and kernel are one file."""
        return self.source

    def show_source(self, which: str = "kernel") -> None:
        """Print the generated C++."""
        print(self.source)

    def export_sources(self, kernel_path: str | Path, host_path: str | Path | None = None) -> None:
        """Write the generated C++ to a file."""
        Path(kernel_path).write_text(self.source)

    def get_profiler(self, tensor_supply_type: TensorSupplyType = TensorSupplyType.Auto) -> Profiler:
        """Timing and comparison on made-up inputs; needs a kernel whose sizes are all known at compile time."""
        return Profiler(self, tensor_supply_type)
