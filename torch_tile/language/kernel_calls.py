# SPDX-License-Identifier: Apache-2.0
"""Bind the arguments of a call to a kernel function, and check the function.

A decorated function must be one that can be traced. Its call names what is missing or unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.diagnostics.spelling import nearest

MODELS = 'models are compiled by torch.compile(model, backend="tile")'
_DEFINITION = "write a plain function: `def kernel(A, B): ...`"


def check_function(function: Any, decorator: str) -> None:
    """Raise TileError unless `function` is a plain Python function, which `decorator` can trace."""
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, classmethod | staticmethod):
        what, fix = f"a {type(function).__name__}", f"write @staticmethod above @{decorator}, and take no `cls`"
    elif type(function).__name__ == "PrimFunc":
        what = "a @T.prim_func already"
        fix = f"torch_tile.compile({name}) compiles it; @torch_tile.jit decorates the function that returns it"
    elif type(function).__name__ == "JITFunction":
        what = "decorated with @torch_tile.jit already"
        fix = "write @torch_tile.jit above a function that returns the @T.prim_func, or leave @T.prim_func out"
    elif isinstance(function, type):
        what, fix = "a class", _DEFINITION
    elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        what, fix = "an async function", _DEFINITION
    elif inspect.isgeneratorfunction(function):
        what, fix = "a generator: it has a `yield`", "write results into tensors of T.empty, and return these"
    elif isinstance(function, str):
        what, fix = "a text", f"name options: @{decorator}(target={function!r})"
    elif not isinstance(function, FunctionType):
        fix = MODELS if hasattr(function, "forward") else _DEFINITION
        what = f"an object of type {type(function).__name__}"
    else:
        return
    raise error("bad_function", None, decorator=decorator, name=name, what=what, fix=fix)


def bind(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], makes_kernel: bool = True
) -> Any:
    """Return the bound arguments of a call, without defaults. Raises TileError where they do not fit.

    `makes_kernel` tells if the function returns a kernel, which is called with the tensors.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as problem:
        raise _bad_call(name, signature, args, kwargs, str(problem), makes_kernel) from None


def _bad_call(
    name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    text: str,
    makes_kernel: bool,
) -> TileError:
    known = list(signature.parameters)
    unknown = [each for each in kwargs if each not in known]
    if unknown:
        near = nearest(unknown[0], known)
        why = f"has no argument `{unknown[0]}`"
        fix = f"did you mean `{near}`?" if near else f"its arguments are {_listed(known)}"
    elif len(args) > len(known):
        why, fix = f"takes {len(known)} arguments, got {len(args)}", f"its arguments are {_listed(known)}"
    elif "multiple values" in text:
        twice = text.rpartition("'")[0].rpartition("'")[2]
        why, fix = f"gets `{twice}` by its position and by its name", "give it once"
    else:
        missing = text.rpartition("'")[0].rpartition("'")[2]
        why, fix = (f"needs `{missing}`" if missing in known else text), f"its arguments are {_listed(known)}"
    is_outer = makes_kernel and is_compile_time(signature)
    if is_outer and any(is_tensor(value) for value in (*args, *kwargs.values())):
        fix = f"{fix.removesuffix('?')}. It takes no tensors: {name}(...) gives a kernel, which is called with them"
    return error("bad_kernel_call", None, name=name, why=why, fix=fix)


def is_compile_time(signature: inspect.Signature) -> bool:
    """Return whether no parameter is annotated as a tensor; a guess for messages."""
    return not any(type(p.annotation).__name__ == "TensorType" for p in signature.parameters.values())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def given_tensors(name: str, bound: Mapping[str, Any], has_inner: bool) -> TileError | None:
    """Return the error for tensors among the compile-time arguments of a lazy kernel; None if there are none.

    `has_inner` tells if the function defines one inside, which may be the kernel.
    """
    found = [each for each, value in bound.items() if is_tensor(value)]
    if not found:
        return None
    why = f"got a tensor for `{found[0]}`, which a kernel is compiled for"
    fix = f"give numbers and dtypes to {name}(...), and the tensors to the kernel that it returns: {name}(...)(x)"
    if not has_inner:
        why = f"got a tensor for `{found[0]}`, which is declared nowhere"
        fix = f"begin with `{found[0]}: T.Tensor((64,), 'float32')`, its shape and dtype, and open `with T.Kernel(...)`"
    return error("bad_kernel_call", None, name=name, why=why, fix=fix)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of torch or an array of NumPy."""
    return (
        type(value).__module__.partition(".")[0] in ("torch", "numpy")
        and hasattr(value, "shape")
        and hasattr(value, "ndim")
    )
