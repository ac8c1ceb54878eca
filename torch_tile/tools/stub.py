# SPDX-License-Identifier: Apache-2.0
"""Write `torch_tile/language/__init__.pyi`, by which editors see each name of T: `python -m torch_tile.tools.stub`.

Many names are made when the module is imported, from tables of tile ops, intrinsics and dtypes. Editors do not run
code, so the stub lists them. A test compares the file with what this module writes.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_tile import language
from torch_tile.ir.dtype import DType
from torch_tile.ir.idmap import IdMap

FILE = Path(language.__file__).with_suffix(".pyi")
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The tile language: `import torch_tile.language as T`.

`python -m torch_tile.tools.stub` writes this file for editors and type checkers.
"""

import builtins
from typing import Any
'''
# Words of annotations that mean the same here. Names such as T.int hide the built-in types of a stub.
PLAIN = re.compile(r"(None|int|str|bool|float)( \| (None|int|str|bool|float))*")
NOT_OURS = ("Any", "annotations")
MODULES = ("torch_tile.ir.expr", "torch_tile.ir.dtype", "torch_tile.tileop.gemm.op")  # homes outside of the language


def text() -> str:
    """Return the text of the stub."""
    homes = _homes()
    imports: dict[str, list[str]] = {}
    dtypes, functions = [], []
    names = public_names()
    for name, value in names.items():
        if isinstance(value, DType):
            dtypes.append(f"{name}: DType")
        elif (home := homes.get(_unwrapped(value))) is None or (home[1] != name and name not in language.__all__):
            functions.append(_function(name, value))
        else:
            imports.setdefault(home[0], []).append(f"{home[1]} as {name}")
    lines = [_listed(f"from {module} import (", found, ")") for module, found in sorted(imports.items())]
    listed = _listed("__all__ = [", [f'"{name}"' for name in sorted(language.__all__)], "]")
    parts = [HEAD, *lines, "", *dtypes, "", *functions, listed]
    return "\n".join(parts) + "\n"


def _listed(head: str, items: Sequence[str], end: str) -> str:
    """Print items between `head` and `end`, one a line."""
    return "\n".join([head, *(f"    {item}," for item in items), end])


def public_names() -> dict[str, Any]:
    """Return the names that a user may take from the language, sorted; `T.__exp` is one."""
    found = {}
    for name, value in sorted(vars(language).items()):
        hidden = name.startswith("_") and (not name.startswith("__") or name.endswith("__"))
        if not hidden and not isinstance(value, ModuleType) and name not in NOT_OURS:
            found[name] = value
    return found


def _unwrapped(value: Any) -> Any:
    """Return the author's function behind the one that checks its arguments."""
    return getattr(value, "__wrapped__", value) if inspect.isfunction(value) else value


def _homes() -> IdMap[Any, tuple[str, str]]:
    """Return the module and the name by which each object can be imported, for those written out in a module."""
    found = IdMap[Any, tuple[str, str]]()
    inside = [f"{language.__name__}.{each.name}" for each in pkgutil.iter_modules(language.__path__)]
    for name in (*inside, *MODULES):
        module = importlib.import_module(name)
        source = inspect.getsource(module)
        for attribute, value in vars(module).items():
            written = re.search(rf"^(?:def|class) {attribute}\b|^{attribute}\b[^\n]*=", source, re.MULTILINE)
            if written and not attribute.startswith("_") and not isinstance(value, int | str | tuple | dict):
                found.setdefault(value, (name, attribute))
    return found


def _function(name: str, value: Any) -> str:
    """Return a function as stubs spell it, with its docstring."""
    parameters = []
    after_star = False
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not after_star:
            parameters.append("*")
            after_star = True
        star = "*" if each.kind is each.VAR_POSITIONAL else ""
        after_star |= bool(star)
        simple = each.default is None or isinstance(each.default, int | float | str)
        default = "" if each.default is each.empty else f" = {each.default!r}" if simple else " = ..."
        parameters.append(f"{star}{each.name}: {_annotation(each.annotation)}{default}")
    result = _annotation(inspect.signature(value).return_annotation)
    doc = textwrap.indent(f'"""{inspect.getdoc(value)}"""', "    ")
    return f"def {name}({', '.join(parameters)}) -> {result}:\n{doc}\n"


def _annotation(given: Any) -> str:
    """Return an annotation as the stub spells it; `Any` if it names what the stub does not import."""
    said = "None" if given is None else str(given)
    if not PLAIN.fullmatch(said):
        return "Any"
    return re.sub(r"\b(int|str|bool|float)\b", r"builtins.\1", said)


if __name__ == "__main__":
    FILE.write_text(text())
