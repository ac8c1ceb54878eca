# SPDX-License-Identifier: Apache-2.0
"""Offer TileLang's language with torch_tile's own compiler, as a PyTorch-native package.

After `import torch_tile` the operators `torch.ops.tile.*` exist; everything else is imported when it is first used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_tile import ops as ops
from torch_tile.diagnostics.variables import warn_of_variables as _warn_of_variables
from torch_tile.inductor.codegen import artifacts as artifacts  # so that torch.compiler.load_cache_artifacts knows ours
from torch_tile.inductor.entry_point import announce as _announce
from torch_tile.ops import all_families as _all_families  # noqa: F401  # declares the operators

__version__ = "0.1.0"  # the only place: pyproject.toml reads it, a test compares CITATION.cff and CHANGELOG.md

if TYPE_CHECKING:
    from torch_tile.autotuner import autotune
    from torch_tile.compat import tvm as tvm
    from torch_tile.compat.tvm import DataType as DataType
    from torch_tile.diagnostics.errors import InternalError, LaunchError, TileError
    from torch_tile.engine import lower as lower
    from torch_tile.env import (
        disable_cache as disable_cache,
        enable_cache as enable_cache,
        is_cache_enabled as is_cache_enabled,
        set_log_level as set_log_level,
    )
    from torch_tile.hardware import Target as Target
    from torch_tile.inductor.backend import inductor_configs, tile as tile
    from torch_tile.inductor.report.explain import explain
    from torch_tile.integrations.replace import replace_layers
    from torch_tile.integrations.transformers import register_with_transformers as register_with_transformers
    from torch_tile.jit import compile, jit, par_compile
    from torch_tile.kernel import JITKernel
    from torch_tile.language import layout as layout
    from torch_tile.language.layout import Fragment as Fragment, Layout as Layout
    from torch_tile.math import cdiv as cdiv, next_power_of_2 as next_power_of_2
    from torch_tile.options import PassConfigKey as PassConfigKey
    from torch_tile.profiler import Profiler as Profiler, TensorSupplyType, do_bench
    from torch_tile.tools.kernel_page import show
    from torch_tile.user_op import custom_op

# Name -> where it lives. A value ending in a colon is the module itself.
_LAZY = {
    "jit": "jit:",
    "compile": "jit:compile",
    "par_compile": "jit:par_compile",
    "autotune": "autotuner:autotune",
    "autotuner": "autotuner:",
    "custom_op": "user_op:custom_op",
    "JITKernel": "kernel:JITKernel",
    "TileError": "diagnostics.errors:TileError",
    "LaunchError": "diagnostics.errors:LaunchError",
    "InternalError": "diagnostics.errors:InternalError",
    "Target": "hardware:Target",
    "PassConfigKey": "options:PassConfigKey",
    "Profiler": "profiler:Profiler",
    "Layout": "language.layout:Layout",
    "Fragment": "language.layout:Fragment",
    "DataType": "compat.tvm:DataType",
    "tvm": "compat.tvm:",
    "cdiv": "math:cdiv",
    "next_power_of_2": "math:next_power_of_2",
    "disable_cache": "env:disable_cache",
    "enable_cache": "env:enable_cache",
    "is_cache_enabled": "env:is_cache_enabled",
    "set_log_level": "env:set_log_level",
    "lower": "engine:lower",
    "env": "env:",
    "math": "math:",
    "utils": "utils:",
    "transform": "transform:",
    "engine": "engine:",
    "compat": "compat:",
    "carver": "carver:",
    "contrib": "contrib:",
    "TensorSupplyType": "profiler:TensorSupplyType",
    "do_bench": "profiler:do_bench",
    "explain": "inductor.report.explain:explain",
    "inductor_configs": "inductor.backend:inductor_configs",
    "_capture_scans": "integrations.scans:capture_scans",  # for the backend, which no integration imports
    "show": "tools.kernel_page:show",
    "replace_layers": "integrations.replace:replace_layers",
    "language": "language:",
    "profiler": "profiler:",
    "layout": "language.layout:",
    "testing": "testing:",
    "nn": "nn:",
    "tile": "inductor.backend:tile",
    "register_with_transformers": "integrations.transformers:register_with_transformers",
}


class _Counterparts:
    """An import finder that serves modules of TileLang by their names under torch_tile. Python asks it last."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's counterpart; None for names of no module of TileLang."""
        if not name.startswith(f"{__name__}."):
            return None
        from torch_tile.compat import find_counterpart

        return find_counterpart(name)


if not any(getattr(finder, "__module__", "") == __name__ for finder in sys.meta_path):  # a reload adds no second one
    sys.meta_path.append(_Counterparts)
_announce()
_warn_of_variables()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        from torch_tile.diagnostics.spelling import missing_name

        for home in () if name.startswith("_") else ("language", "ops", "nn"):
            if name in import_module(f".{home}", __name__).__all__:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}; write {__name__}.{home}.{name}")
        raise missing_name(__name__, name, _LAZY)
    module, _, attribute = _LAZY[name].partition(":")
    found = import_module(f".{module}", __name__)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


__all__ = [
    "InternalError",
    "JITKernel",
    "LaunchError",
    "TensorSupplyType",
    "TileError",
    "__version__",
    "autotune",
    "compile",
    "custom_op",
    "do_bench",
    "explain",
    "inductor_configs",
    "jit",
    "ops",
    "par_compile",
    "replace_layers",
    "show",
]
