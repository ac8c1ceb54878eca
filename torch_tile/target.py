# SPDX-License-Identifier: Apache-2.0
"""What a kernel is compiled for. Features are asked for by name, never by comparing versions."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from .diagnostics import error

CPU_SPELLINGS = ("auto", "cpu", "c", "llvm", "host")


@dataclass(frozen=True)
class Target:
    """A machine to compile for: `kind` is "cpu"."""

    kind: str = "cpu"

    @classmethod
    def of(cls, target: object = "auto") -> Target:
        """From a name. A CUDA target is compiled for the CPU, with a warning, while there is no CUDA code generator."""
        if isinstance(target, Target):
            return target
        text = [*str(target).lower().split(), "auto"][0]
        if text in CPU_SPELLINGS:
            return cls("cpu")
        if text.startswith(("cuda", "sm_", "nvidia")):
            warnings.warn(f"target {text!r}: no CUDA code generator here, compiling for the CPU", stacklevel=3)
            return cls("cpu")
        if text.startswith(("hip", "metal", "webgpu", "cutedsl")):
            fix = "compile for target='cpu'"
            raise error("unsupported_on_target", None, what="code generation", target=text, fix=fix)
        raise error("bad_argument", None, op="Target", name="target", why=f"is {target!r}", fix="give 'cpu' or 'auto'")

    def __str__(self) -> str:
        return self.kind
