# SPDX-License-Identifier: Apache-2.0
"""What Python itself finds wrong on an author's line, told as an error of the author's.

Tile expressions and buffers are no numbers, lists or tensors: where an author gives one to a function of Python or
torch, or asks it for a method of a tensor, Python names classes of the compiler, which authors do not know.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from torch_tile.diagnostics.errors import Span, TileError, error
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Expr
from torch_tile.language.values import Handle

_CLASSES = {c.__name__ for c in (*Expr.__subclasses__(), Handle, Region)}
_CASTS = {"int": "T.cast(x, 'int32')", "float": "T.cast(x, 'float32')"}
_HAVE = {
    Handle: "a buffer has .shape, .strides, .dtype, .ndim, .name and .scope(); T's functions compute with it",
    Region: "a region can be copied, filled, reduced and multiplied by T's functions",
}


def explain(problem: Exception, span: Span | None, language: Any) -> TileError | None:
    """The author's error that `problem`, raised on the author's own line at `span`, stands for; None if it is another.

    `language` has the functions whose calls may be wrong.
    """
    text = str(problem)
    if isinstance(problem, AttributeError):
        kind = type(problem.obj)
        if isinstance(problem.obj, Expr | Handle | Region):
            what = f"`{str(problem.obj)[:60]}` has no `{problem.name}`"
            fix = _HAVE.get(kind, "write operators and T's functions, such as T.exp(x) or T.cast(x, dtype)")
            return error("python_value", span, problem=what, fix=fix)
    called = re.match(r"(\w+)(\.__init__)?\(\) (got|missing|takes)", text)
    function = getattr(language, called[1], None) if called else None
    if callable(function):
        return bad_call(called[1], function, text, span)  # type: ignore[index]
    words = set(re.findall(r"\w+", text))
    if words.isdisjoint(_CLASSES):
        return None
    text = re.sub(rf"\b({'|'.join(_CLASSES)})\b", lambda m: _kind(m[0]), text)
    fix = _instead(span, language)
    if isinstance(problem, IndexError):  # of a tensor or array that the author's Python holds
        fix = "give the tensor to the kernel as a parameter; only Python's own numbers may be captured"
    return error("python_value", span, problem=text, fix=fix)


def bad_call(name: str, function: Callable[..., Any], text: str, span: Span | None) -> TileError:
    """The error for a call of `T.name` whose arguments do not fit, with Python's `text` about it."""
    given = inspect.signature(function).parameters.values()
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown:
        known = [p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
        near = nearest(unknown[1], known)
        fix = (
            f"did you mean `{near}`?" if near else f"its parameters are {', '.join(known)}" if known else "leave it out"
        )
        return error("unknown_keyword", span, name=name, keyword=unknown[1], fix=fix)
    why = text[text.index("()") + 3 :] if "()" in text else text
    parameters = [str(p).split(":")[0].split(" =")[0] for p in given]
    return error("bad_call", span, name=name, why=why, parameters=", ".join(parameters))


def nearest(name: str, known: Sequence[str]) -> str:
    """The name of `known` that is spelt most like `name`; empty if none is."""
    spellings = {k.lower(): k for k in known}
    found = get_close_matches(name.lower(), spellings, 1)
    return spellings[found[0]] if found else ""


def _kind(name: str) -> str:
    return {"Handle": "a buffer", "Region": "a region"}.get(name, "a tile expression")


def _instead(span: Span | None, language: Any) -> str:
    """What to write for the function that is called where the span begins."""
    source = span.source()[span.column :] if span else ""
    called = re.match(r"([\w.]+)\(", source)
    name = called[1].rpartition(".")[2] if called else ""
    if name in _CASTS:
        return f"write {_CASTS[name]}"
    if called and not called[1].startswith("T.") and callable(getattr(language, name, None)):
        return f"write T.{name}(...)"
    return "write operators and T's functions, such as T.exp(x), T.max(x, y) or T.cast(x, dtype)"
