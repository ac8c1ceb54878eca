# SPDX-License-Identifier: Apache-2.0
"""Serve files written for TileLang as they are: after `install()`, `import tilelang` gives torch_tile.

`import tilelang` gives nothing of ours unless `install` is called, and never where the real TileLang is imported
already. Each module `tilelang.NAME` is the module `torch_tile.NAME`, the same object; `tvm` is the small module
`torch_tile.compat.tvm`. `torch_tile.NAME` can always be imported: `find_counterpart` knows the modules that have
another name here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch_tile.compat.absent import MODULES, NAMES, absent, reason, reason_of_name
from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.tolerance import tolerate

OURS = "torch_tile"
TVM = f"{OURS}.compat.tvm"
# Modules whose counterpart has another name.
ELSEWHERE = {
    "tilelang.layout": f"{OURS}.language.layout",
    # Names of versions before 0.1.15.
    "tilelang.intrinsics": f"{OURS}.cuda.intrinsics",
    "tilelang.intrinsics.mma_macro_generator": f"{OURS}.cuda.intrinsics.macro.mma_macro_generator",
    "tilelang.intrinsics.wgmma_macro_generator": f"{OURS}.cuda.intrinsics.macro.wgmma_macro_generator",
    "tilelang.engine.callback": f"{OURS}.compat.callback",
    "tilelang.engine.lower": f"{OURS}.engine",
    "tilelang.language.fp8": f"{OURS}.compat.fp8",
    "tilelang.tvm": TVM,
    "tvm": TVM,
    "tvm.tirx": f"{TVM}.tir",
    "tilelang.backend": f"{OURS}.utils",
    "tilelang.carver.matmul_analysis": f"{OURS}.carver.arch.cuda",
    "tilelang.rocm.target": f"{OURS}.compat.rocm",
    "tilelang.backend.target": f"{OURS}.utils.target",
    "tilelang.cuda.language": f"{OURS}.language",
    "tilelang.cuda.target": f"{OURS}.utils.target",
    "tilelang.tileop.base": f"{OURS}.language",
    "tilelang.dtypes": f"{OURS}.compat.dtypes",
    "tilelang.language.dtypes": f"{OURS}.compat.dtypes",
    "tilelang.language.v2.dtypes": f"{OURS}.compat.dtypes",
    "tilelang.jit.adapter": f"{OURS}.compat.adapter",
    "tilelang.jit.adapter.base": f"{OURS}.compat.adapter",
    "tilelang.jit.kernel": f"{OURS}.kernel",
}
# Modules whose names are those of the module around them here, of TileLang 0.1.15 and some versions before it.
PARTS = {
    "tilelang.language": (
        f"{OURS}.language",
        "annotations ast atomic builtin common copy_op customize eager eager.ast eager.builder eager.utils "
        "experimental experimental.gemm_sp_op fill_op frame gemm_op kernel logical loop math_intrinsics meta "
        "proxy reduce_op scan_op symbolics tile_schedule tir tir.entry tir.ir tir.op utils v2 v2.annot v2.builder "
        "warp_specialize warpgroup",
    ),
    "tilelang.autotuner": (f"{OURS}.autotuner", "capture param tuner"),
    "tilelang.carver.arch.driver": (f"{OURS}.carver.arch.driver", "cuda_driver"),
    "tilelang.carver.arch": (f"{OURS}.carver.arch", "arch_base cpu"),
    "tilelang.carver.template": (f"{OURS}.carver.template", "base elementwise matmul"),
    "tilelang.cuda.intrinsics": (f"{OURS}.cuda.intrinsics", "layout layout.mma_layout layout.utils"),
    "tilelang.cuda.language": (f"{OURS}.language", "atomic intrinsics pdl"),
    "tilelang.engine": (f"{OURS}.engine", "param"),
    "tilelang.intrinsics": (f"{OURS}.cuda.intrinsics", "mma_layout utils"),
    "tilelang.layout": (f"{OURS}.language.layout", "fragment gemm_sp layout partial_fragment swizzle"),
    "tilelang.profiler": (f"{OURS}.profiler", "bench"),
    "tilelang.transform": (f"{OURS}.transform", "pass_config simplify"),
}
ELSEWHERE |= {f"{name}.{part}": whole for name, (whole, parts) in PARTS.items() for part in parts.split()}


@names_parameters
def install(tvm: bool = True) -> None:
    """Let `import tilelang`, and `import tvm` unless `tvm` is False, give what torch_tile has.

    Kernels that write tensors which require gradients run; elsewhere such calls are errors.
    Calls after the first change nothing. Raises ImportError where the real module is imported already.
    """
    for name in ("tilelang", "tvm")[: 1 + tvm]:
        if name in _serving:
            continue
        if name in sys.modules:
            raise ImportError(
                f"the real {name} is imported already, and torch_tile does not replace it: call "
                f"torch_tile.compat.install() before `import {name}`"
                + (", or install(tvm=False)" if name == "tvm" else "")
            )
        _serving.add(name)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    tolerate(True)


def uninstall() -> None:
    """Undo `install`: later imports find the real modules again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _serving]:
        del sys.modules[name]
    for name in _inserted:
        above, _, last = name.rpartition(".")
        sys.modules.pop(name, None)
        vars(sys.modules[above]).pop(last, None)
    _serving.clear()
    _given.clear()
    _inserted.clear()
    tolerate(False)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def is_installed() -> bool:
    """Return whether `import tilelang` gives torch_tile."""
    return "tilelang" in _serving


def counterpart(name: str) -> str:
    """Return the module of torch_tile that stands for TileLang's module `name`."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    above, _, last = name.rpartition(".")
    return f"{counterpart(above)}.{last}" if above else OURS


def _inside(module: str, last: str) -> str:
    """Return the counterpart of TileLang's module `last` inside the one for which our `module` stands; "" for none."""
    for name, served in ELSEWHERE.items():
        above, _, inner = name.rpartition(".")
        if inner == last and above and counterpart(above) == module:
            return served
    return ""


def _exists(name: str) -> bool:
    """Return whether there is a module of this name."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a module around it is no package
        return False


def _hides(name: str) -> bool:
    """Return whether the module would hide a function of its package, such as T.copy."""
    above, _, last = name.rpartition(".")
    return name in ELSEWHERE and not isinstance(vars(sys.modules.get(above, sys)).get(last, sys), ModuleType)


class _Served(Loader):
    """An import loader that gives a module which exists under its own name."""

    def __init__(self, served: str, name: str):
        self.served, self.name = served, name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, which the import machinery is about to mark as another."""
        self.module = importlib.import_module(self.name)
        _given.add(self.name)
        self.own = self.module.__spec__
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own `__spec__`, which the import replaced. Its code ran when it was first imported."""
        module.__spec__ = self.own
        _keep_functions(self.served)


def _keep_functions(fullname: str) -> None:
    """Serve modules that have the name of a function beside them, such as tilelang.engine.lower, before they are
    imported: an import of them would put the module into the function's place. `annotations` is __future__'s name.
    """
    for name in ELSEWHERE:
        above, _, last = name.rpartition(".")
        found = vars(sys.modules[fullname]).get(last) if above == fullname else None
        beside = callable(found) and getattr(found, "__module__", "") == ELSEWHERE[name]
        if name not in sys.modules and (beside or found is annotations):
            sys.modules[name] = importlib.import_module(ELSEWHERE[name])


class _AbsentModule(ModuleType):
    """A module of which each name can be imported and none can be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return absent(f"{self.__name__}.{name}")


class _Empty(Loader):
    """An import loader of modules without a counterpart: absent.py. `name` is TileLang's or TVM's."""

    def __init__(self, name: str):
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module, whose names are all absent."""
        return _AbsentModule(self.name, f"It is {reason(self.name)}.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete, and has no code to run."""


class _Name(Loader):
    """An import loader of a name that a module of ours lacks: it stands where a module would."""

    def __init__(self, why: str):
        self.why = why

    def create_module(self, spec: ModuleSpec) -> Any:
        """Return an absent name."""
        return absent(spec.name, self.why)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: an absent name has no code to run."""


class _Finder(MetaPathFinder):
    """An import finder of the modules that `install` serves.

    Python looks for a name that a module lacks as for a module inside, by the module's own name: for
    `from tilelang import _ffi_api` it asks for torch_tile._ffi_api.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the counterpart's, for served names. Raises ModuleNotFoundError where there is none."""
        module, _, last = fullname.rpartition(".")
        if module in _given and PathFinder.find_spec(fullname, path) is None:
            loader: Loader | None = None
            if name := _inside(module, last):
                loader = _Served(fullname, name)
            elif why := reason_of_name(module, last):
                loader = _Name(why)
            if loader is not None:
                _inserted.append(fullname)
                return ModuleSpec(fullname, loader, is_package=True)
        if fullname.partition(".")[0] not in _serving:
            return None
        name = counterpart(fullname)
        if _exists(name) and not _hides(fullname):
            return ModuleSpec(fullname, _Served(fullname, name), is_package=True)
        if reason(fullname):
            return ModuleSpec(fullname, _Empty(fullname), is_package=True)
        raise ModuleNotFoundError(f"torch_tile has no counterpart of the module {fullname!r}", name=fullname)


def find_counterpart(fullname: str) -> ModuleSpec | None:
    """Find what TileLang's module or name is here, where a file asks for it as `torch_tile.NAME`; None for others.

    Names without a counterpart can be imported, as after `install`, but few private ones. Their use is an error.
    """
    module, _, last = fullname.rpartition(".")
    inside = fullname.removeprefix(f"{OURS}.")
    name = inside if inside.startswith("tvm.") else f"tilelang.{inside}"
    if name in ELSEWHERE:
        return ModuleSpec(fullname, _Served(fullname, ELSEWHERE[name]), is_package=True)
    if last.startswith("_") and last not in NAMES.get(module, "").split():
        return None
    is_within_absent = name.startswith("tvm.") or isinstance(sys.modules.get(module), _AbsentModule)
    if name in MODULES or (is_within_absent and reason(name)):
        return ModuleSpec(fullname, _Empty(name), is_package=True)
    why = reason_of_name(module, last)
    return ModuleSpec(fullname, _Name(why), is_package=True) if why else None


_serving: set[str] = set()
_given: set[str] = set()  # names of modules of ours that were served
_inserted: list[str] = []  # names that they lacked
_finder = _Finder()
