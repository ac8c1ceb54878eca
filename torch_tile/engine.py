# SPDX-License-Identifier: Apache-2.0
"""Provide `tilelang.lower`, which generates the source of a kernel without calling the kernel."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch_tile.jit import compile
from torch_tile.kernel import JITKernel
from torch_tile.language.program import PrimFunc

__path__: list[str] = []  # TileLang's module of this name has modules inside: compat
sys.modules[f"{__name__}.lower"] = sys.modules[__name__]  # so that an import of that module hides no function


@dataclass(frozen=True)
class CompiledArtifact:
    """A compiled kernel by TileLang's names: `kernel_source` is its text, `params` its signature."""

    kernel: JITKernel

    @property
    def kernel_source(self) -> str:
        """Return the generated C++ or CUDA C++."""
        return self.kernel.get_kernel_source()

    @property
    def params(self) -> tuple[Any, ...]:
        """Return the buffers and scalars of the signature."""
        return self.kernel.params


def lower(
    func: PrimFunc,
    target: object = "auto",
    target_host: object = None,
    runtime_only: bool = False,
    enable_host_codegen: bool = False,
    enable_device_compile: bool = False,
) -> CompiledArtifact:
    """Compile a @T.prim_func for a target. Only `target` has an effect. Raises TileError for mistakes in the kernel."""
    return CompiledArtifact(compile(func, target=target))
