# SPDX-License-Identifier: Apache-2.0
"""Stand for modules of TileLang and TVM that have no counterpart, so that files which import them run.

A name of such a module can be imported. It is no type of any object, and its use is an error that says what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.language.misuse import instead
from torch_tile.language.trace import author_span

# What modules are, by the names that begin theirs.
MODULES = {
    "tvm": "a part of TVM, whose IR no kernel needs",
    "tilelang.rocm": "for AMD's GPUs",
    "tilelang.metal": "for Apple's GPUs",
    "tilelang.webgpu": "for browsers",
    "tilelang.contrib.cutedsl": "for another generator of code",
    "tilelang.contrib.hipcc": "for AMD's GPUs",
    "tilelang.jit.adapter.cutedsl": "for another generator of code",
    "tilelang.jit.abi": "a part of TileLang's launchers",
    "tilelang.jit.adapter": "a part of TileLang's launchers",
    "tilelang.jit.diagnostics": "a part of TileLang's compiler",
    "tilelang.backend": "a part of TileLang's compiler",
    "tilelang.cache": "a part of TileLang's cache",
    "tilelang.cuda.op": "a part of TileLang's compiler",
    "tilelang.cuda.pipeline": "a part of TileLang's compiler",
    "tilelang.cuda.backend": "a part of TileLang's compiler",
    "tilelang.cuda.intrinsics": "for GPUs that this compiler does not serve",
    "tilelang.errors": "a part of TileLang's compiler",
    "tilelang.instrumentation": "about the passes of TileLang's compiler",
    "tilelang.ir": "about TVM's IR, which no kernel needs",
    "tilelang.language.eager": "a part of TileLang's front end",
    "tilelang.layout.cute": "a part of TileLang's compiler",
    "tilelang.tileop": "a part of TileLang's compiler",
    "tilelang.tools": "about the passes of TileLang's compiler",
    "tilelang.transform": "a pass of TileLang's compiler",
    "tilelang.utils": "a part of TileLang's compiler",
}


# Names of TileLang's that a module of ours lacks.
NAMES = {
    "torch_tile.autotuner": "CompileArgs ProfileArgs",
    "torch_tile.cuda.intrinsics.macro.mma_macro_generator": "TensorCoreIntrinEmitterWithLadderTransform",
    "torch_tile.cuda.intrinsics.macro.wgmma_macro_generator": "compute_gmma_descriptor",
    "torch_tile.language.layout": "SwizzleMode cute",
    "torch_tile.transform": "LowerAccessPtr",
    "torch_tile.utils": "BackendContext create_backend_context get_backend list_backends register_backend",
    "torch_tile.utils.target": "auto_detect_target list_target_detectors register_target_detector",
}


def reason(name: str) -> str:
    """Say what a name of TileLang's or TVM's is that has no counterpart; "" for a name that neither has."""
    while name:
        if name in MODULES:
            return MODULES[name]
        name = name.rpartition(".")[0]
    return ""


def reason_of_name(module: str, name: str) -> str:
    """Say what a name is that a module of ours lacks and TileLang's has; "" for one that TileLang has not, either.

    Private names are taken for TileLang's.
    """
    if name.startswith("_"):
        return "" if name.startswith("__") else "a private name of TileLang's"
    if name in NAMES.get(module, "").split():
        return "a part of TileLang's compiler"
    return instead(name) if module == "torch_tile.language" else ""


class _Absent(type):
    """The class of absent names: each is a class itself, so that `isinstance(x, name)` is False for all x."""

    _why: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}", cls._why)

    def __call__(cls, *args: Any, **named: Any) -> NoReturn:
        raise _refusal(cls)

    def __iter__(cls) -> Iterator[Any]:
        raise _refusal(cls)

    def __instancecheck__(cls, value: object) -> bool:
        return False

    def __repr__(cls) -> str:
        return f"<{cls.__qualname__}, which torch_tile does not have>"


def absent(name: str, why: str = "") -> Any:
    """Return what stands for the name of a module: an object whose use is an error that says why."""
    why = why or reason(name)
    return _Absent(name.rpartition(".")[2], (), {"__qualname__": name, "__doc__": f"`{name}` is {why}.", "_why": why})


def _refusal(cls: _Absent) -> TileError:
    """Say what an absent name is, on the line that uses it."""
    return error("absent_name", author_span(), name=cls.__qualname__, why=cls._why)


__all__ = ["MODULES", "absent", "reason", "reason_of_name"]
