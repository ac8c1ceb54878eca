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
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_tile.compat.absent import MODULES, NAMES, absent, is_absent, reason, reason_of_name
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
    tolerate(True)


def uninstall() -> None:
    """Undo `install`: later imports find the real modules again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _serving]:
        del sys.modules[name]
    for name in reversed(_inserted):  # inner ones first
        above, _, last = name.rpartition(".")
        gone = sys.modules.pop(name, None)
        if gone is not None and above in sys.modules and vars(sys.modules[above]).get(last) is gone:
            delattr(sys.modules[above], last)
    _serving.clear()
    _given.clear()
    _inserted.clear()
    tolerate(False)


def is_installed() -> bool:
    """Return whether `import tilelang` gives torch_tile."""
    return "tilelang" in _serving


def counterpart(name: str) -> str:
    """Return the module of torch_tile that stands for TileLang's module `name`."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    above, _, last = name.rpartition(".")
    return f"{counterpart(above)}.{last}" if above else OURS


def _names(module: str) -> list[str]:
    """Return TileLang's and TVM's names of a module: those for which ours stands, its own if it is absent here."""
    if module.partition(".")[0] != OURS:
        return [module]
    own = f"tilelang{module.removeprefix(OURS)}"
    return [own, *(name for name, served in ELSEWHERE.items() if served == module)]


def _exists(name: str) -> bool:
    """Return whether there is a module of this name, and not only what stands for one that is absent."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a module around it is no package
        return False
    return spec is not None and not isinstance(spec.loader, _Lacking)


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


class _Lacking(Loader):
    """An import loader of what has no counterpart, a module or a name that would stand where a module does: absent.py.

    `name` is what its use is told, and `why` the reason.
    """

    def __init__(self, name: str, why: str):
        self.name, self.why = name, why

    def create_module(self, spec: ModuleSpec) -> Any:
        """Return an absent name, whose names are all absent."""
        return absent(self.name, self.why)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: an absent name has no code to run."""


class _Finder(MetaPathFinder):
    """An import finder that Python asks first: of names that `install` serves, and of names inside renamed modules.

    A renamed module was imported by another name than its own. Python would load its parts a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the counterpart's. Raises ModuleNotFoundError for served names without one."""
        root = fullname.partition(".")[0]
        if root not in _serving and not (root == OURS and _home(fullname) != fullname.rpartition(".")[0]):
            return None
        found = find_counterpart(fullname)
        if found is None and root in _serving:
            raise ModuleNotFoundError(f"torch_tile has no counterpart of the module {fullname!r}", name=fullname)
        return found


def _home(fullname: str) -> str:
    """Return the own name of the module in which one of this name is looked for."""
    above = fullname.rpartition(".")[0]
    module = sys.modules.get(above)
    if module is None:
        return above
    return module.__qualname__ if is_absent(module) else module.__name__


def find_counterpart(fullname: str) -> ModuleSpec | None:
    """Find what TileLang's module or name is here, by TileLang's name or as `torch_tile.NAME`; None for others.

    Python looks for a name that a module lacks as for a module inside, by the module's own name: for
    `from tilelang import _ffi_api` it asks for torch_tile._ffi_api. Names without a counterpart can be imported, but
    few private ones unless `install` serves their module. Their use is an error.
    """
    is_served, home, last = fullname.partition(".")[0] in _serving, _home(fullname), fullname.rpartition(".")[2]
    names = [fullname] if is_served else [f"{name}.{last}" for name in _names(home)]
    served = [counterpart(name) for name in names if not _hides(name)]
    loader: Loader | None = None
    if found := next((name for name in served if name != fullname and _exists(name)), ""):
        loader = _Served(fullname, found)
    elif lacking := next((name for name in names if reason(name) and (is_served or _is_lacking(name, fullname))), ""):
        loader = _Lacking(lacking, reason(lacking))
    elif not last.startswith("_") or home in _given or last in NAMES.get(home, "").split():
        why = reason_of_name(home, last)
        loader = _Lacking(fullname, why) if why else None
    if loader is None:
        return None
    if _serving and not is_served:
        _inserted.append(fullname)
    return ModuleSpec(fullname, loader, is_package=True)


def _is_lacking(name: str, fullname: str) -> bool:
    """Return whether TileLang's or TVM's `name`, asked for as `fullname`, is a module that is absent, or in one."""
    return name in MODULES or name.startswith("tvm.") or is_absent(sys.modules.get(fullname.rpartition(".")[0]))


_serving: set[str] = set()
_given: set[str] = set()  # names of modules of ours that were served
_inserted: list[str] = []  # names that they lacked
if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):  # a reload adds no second one
    sys.meta_path.insert(0, _Finder())
