# SPDX-License-Identifier: Apache-2.0
"""Calls of T's functions: arguments that do not fit the signature are an error on the author's line.

A function's signature is the one list of its parameters. `help(T.gemm)` shows it; Python checks calls against it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch_tile.diagnostics.arguments import Kind, declared, kinds_of, refused, shown
from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir.bits import reinterpreted
from torch_tile.ir.buffer import Region, Steps
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Const, Expr, Load, Vector, cast, is_number, lanewise
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.stmt import Stmt, Store
from torch_tile.language.lengths import settled
from torch_tile.language.misuse import CALLS, bad_call
from torch_tile.language.trace import author_span, is_of_ours, is_of_python, tracer
from torch_tile.language.values import Annotation, Handle, copy_strided, dtype_of, fill_strided
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.fill import Fill

# Decorators, which look at the names around their caller.
DECORATORS = ("inline", "macro", "meta_class", "prim_func")
CONVERSIONS = ("cast", "Cast", "reinterpret")


def recorded(name: str, build: Callable[..., Any]) -> Callable[..., None]:
    """Make the function `T.name`, which records the node that `build` returns. It has the signature of `build`."""

    def record(*args: Any, **kwargs: Any) -> None:
        at = tracer(f"T.{name}")
        if any(isinstance(value, Steps) for value in (*args, *kwargs.values())):
            at.emit(_call(name, _in_steps(name), args, kwargs))
        else:
            for one in _call(name, build, args, kwargs).recorded():
                at.emit(_store(one) if at.in_nest else settled(one) if isinstance(one, Copy) else one)

    record.__name__ = record.__qualname__ = name
    record.__doc__ = build.__doc__
    record.__signature__ = inspect.signature(build).replace(return_annotation=None)  # type: ignore[attr-defined]
    return record


def _store(one: Stmt) -> Stmt:
    """Turn a copy or a fill of one element, in an iteration of T.Parallel, into a store."""
    if not isinstance(one, Copy | Fill) or not _is_element(one.dst):
        return one
    if isinstance(one, Fill):
        return Store(one.dst.buffer, one.dst.starts, one.value)
    if not _is_element(one.src):
        return one
    value = cast(Load(one.src.buffer, one.src.starts), one.dst.buffer.dtype)
    return Store(one.dst.buffer, one.dst.starts, value)


def _is_element(region: Region) -> bool:
    return all(isinstance(each.extent, Const) and each.extent.value == 1 for each in region.ranges)


def _in_steps(name: str) -> Callable[..., Any]:
    """Record an operation that has an operand with steps."""
    if name in ("copy", "fill"):
        return copy_strided if name == "copy" else fill_strided
    why, fix = "has steps", "copy it to a tile by T.copy, which takes slices with steps"
    raise error("bad_argument", None, op=f"T.{name}", name="a slice", why=why, fix=fix)


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` as `T.name`, so that a call that does not fit its signature raises TileError."""

    of_values = function.__module__ == "torch_tile.language.math"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if of_values and (
            any(isinstance(a, Vector) for a in args) or (name in CONVERSIONS and any(_vector_type(a) for a in args))
        ):
            return _of_vectors(name, function, args, kwargs)
        return _call(name, function, args, kwargs)

    return call


def _vector_type(value: Any) -> DType | None:
    """Return a vector dtype named by text such as "float32x4", else None."""
    if not isinstance(value, str) or "x" not in value:
        return None
    found = dtype_of(value)
    return found if found.lanes > 1 else None


def _of_vectors(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of scalars lane by lane. A conversion to a vector's type converts each lane."""
    if name in ("reinterpret", "Cast", "cast"):
        kinds = [a for a in args if isinstance(a, str | type(None))] + [v for k, v in kwargs.items() if k == "dtype"]
        values = [a for a in args if not isinstance(a, str)]
        if name == "reinterpret":
            return reinterpreted(values[0], kinds[0])
        to = dtype_of(kinds[0])
        if not isinstance(values[0], Vector):
            return Vector([function(values[0], to.element)] * to.lanes) if name == "cast" else to(values[0])
        values[0].astype(to)  # as many lanes
        args = tuple(to.element if a is kinds[0] else a for a in args)
        kwargs = {k: to.element if k == "dtype" else v for k, v in kwargs.items()}
    return lanewise(lambda *values: _call(name, function, values, kwargs), *args)


def check_all(names: dict[str, Any]) -> None:
    """Replace the functions of the language among `names` by checked ones. Two names of one function stay so."""
    made = IdMap[Any, Callable[..., Any]]()
    for name, value in list(names.items()):
        if isinstance(value, Annotation):
            value.function = made.setdefault(value, checked(value.function.__name__, value.function))
        ours = isinstance(value, FunctionType) and value.__module__.startswith("torch_tile.")
        hidden = name.endswith("__") or (name.startswith("_") and not name.startswith("__"))  # not __exp
        if not ours or hidden or name in DECORATORS:
            continue
        if not hasattr(value, "__signature__"):  # those of `recorded` are checked already
            own = value.__name__  # which an alias does not bear
            first = own if names.get(own) is value else name
            names[name] = made.setdefault(value, checked(first, value))


def _call(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of the language; report wrong arguments at the author's line, its own checks first."""
    try:
        found = function(*args, **kwargs)
    except Exception as problem:
        if isinstance(problem, TypeError) and problem.__traceback__ and problem.__traceback__.tb_next is None:
            raise bad_call(name, function, str(problem), author_span()) from None  # Python could not even call it
        if getattr(problem, "code", "") in ("bad_operand", "reduce_dim") and (
            better := _misfit(name, function, args, kwargs)
        ):
            raise better from None  # it names the parameter
        if not is_of_python(problem) or not is_of_ours(problem):
            raise
        given = ", ".join([*map(_shown, args), *(f"{key}={_shown(value)}" for key, value in kwargs.items())])
        text = re.sub(r"[\w.]+\.<locals>\.", "", str(problem))
        why = f"cannot take these arguments: {given} ({type(problem).__name__}: {text})"
        parameters = ", ".join(inspect.signature(function).parameters)
        told = error("bad_call", author_span(), name=name, why=why, parameters=parameters)
        raise _misfit(name, function, args, kwargs) or told from problem
    if wrong := _misfit(name, function, args, kwargs):
        raise wrong
    return found


def _misfit(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TileError | None:
    """Build the error for the first argument that its annotation refuses; None if all fit."""
    names, kinds = _declared(function)
    for parameter, value in refused(names, kinds, args, kwargs):
        fix = CALLS.get(name) or "give " + " or ".join(text for _, text in kinds[parameter])
        fix = fix.replace("a Handle", "a buffer")
        return error("bad_argument", None, op=f"T.{name}", name=parameter, why=f"is {_shown(value)}", fix=fix)
    return None


@functools.cache
def _declared(function: Callable[..., Any]) -> tuple[list[str], dict[str, list[Kind]]]:
    """Return `declared` of a function of the language, whose scalars may be expressions."""
    return declared(function, lambda parameter: _kinds(parameter, function))


def _kinds(parameter: inspect.Parameter, function: Callable[..., Any]) -> list[Kind]:
    """Return what a parameter takes."""
    if parameter.annotation in ("Scalar", "Scalar | None"):
        is_optional = parameter.default is None or parameter.annotation != "Scalar"
        return [_SCALAR, *(kinds_of(type(None), function) if is_optional else ())]
    return kinds_of(parameter.annotation, function)


def _is_scalar(value: object) -> bool:
    """Return whether a value may be a number or an expression; what looks like a tile is checked further on."""
    return is_number(value) or isinstance(value, Expr | Handle | Region | Steps | Vector)


_SCALAR: Kind = (_is_scalar, "a number or an expression")


def _shown(value: object) -> str:
    """Return an argument as messages show it: what the author computes with by its own text."""
    what = "the value" if isinstance(value, Expr) else "the buffer" if isinstance(value, Handle) else "the region"
    return f"{what} `{value!r}`"[:80] if isinstance(value, Expr | Handle | Region) else shown(value)
