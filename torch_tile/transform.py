# SPDX-License-Identifier: Apache-2.0
"""Provide what TileLang kernels import from `transform`: pass options, and the pass that drops unused tensors.

The passes of this compiler are in torch_tile.lowering, and work on its own programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var
from torch_tile.ir.node import find, symbols
from torch_tile.ir.stmt import Program, dimensions
from torch_tile.language.program import PrimFunc
from torch_tile.options import PassConfigKey as PassConfigKey

__path__: list[str] = []  # TileLang's module of this name has modules inside: compat


def simplify_prim_func(func: Callable[..., Any]) -> Any:
    """Decorate a @T.prim_func, or a function that returns one, so that unused tensors leave its parameters."""
    if isinstance(func, PrimFunc):
        return apply_simplify(func)

    @functools.wraps(func)
    def simplified(*args: Any, **named: Any) -> Any:
        return apply_simplify(func(*args, **named))

    return simplified


def apply_simplify(stmt: Any, inline_let: bool = False) -> Any:
    """Return a @T.prim_func without the parameters that are unused tensors, as TileLang's pass of this name does.

    A tensor that alone tells a size of the call stays. Expressions are simplified in any case; `inline_let` has no
    effect. Other values stay as they are.
    """
    if not isinstance(stmt, PrimFunc):
        return stmt
    program = stmt.program
    used = set().union(*map(symbols, program.kernels))
    used |= {view.base for view in program.views} | {each.base for each in used if isinstance(each, Buffer)}
    needed = [var for kernel in program.kernels for var in find(kernel, Var) if var.role == "dim"]
    for param in program.params:
        if isinstance(param, Buffer) and param not in used:
            program = _without(program, param, needed)
    return stmt if program is stmt.program else PrimFunc(stmt.function, program, stmt.compile_flags)


def _without(program: Program, param: Buffer, needed: list[Var]) -> Program:
    """Return the program without a parameter, unless it alone tells a size that is needed."""
    fewer = replace(program, params=tuple(p for p in program.params if p is not param))
    return fewer if set(dimensions(fewer)).issuperset(needed) else program


__all__ = ["PassConfigKey", "apply_simplify", "simplify_prim_func"]
