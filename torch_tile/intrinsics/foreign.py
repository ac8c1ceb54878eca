# SPDX-License-Identifier: Apache-2.0
"""Calls of functions that an author wrote in CUDA or C++: T.call_extern, T.ptx.

The text is compiled as it stands. The author declares the call's memory accesses. Without a declaration it may read and
write all of each buffer behind an address. The interpreters compute the call by a Python function of the author.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch_tile.diagnostics.errors import Span, error
from torch_tile.intrinsics.base import Access, Intrinsic, declare, same
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Address, Call, Expr

NAME = "call_extern"
_MEANINGS: dict[tuple[object, ...], Callable[..., Any]] = {}  # by what a call's options say


def foreign_call(
    function: str, args: Sequence[Expr], dtype: DType, accesses: Sequence[str], cuda: str, cpu: str
) -> Call:
    """Build a call of `function`, defined by the text `cuda`, or on CPUs by `cpu`.

    Each of `accesses` tells the access behind an address: "rw 8" reads and writes 8 elements; "r -1" reads any; ""
    belongs to a value.
    """
    return Call(NAME, tuple(args), dtype, (function, "|".join(accesses), cuda, cpu))


def function_of(call: Call) -> str:
    """Return the name of the function that is called."""
    return str(call.options[0])


def text_of(call: Call, is_cuda: bool) -> str:
    """Return the author's text that a call needs."""
    return str(call.options[2 if is_cuda else 3])


def register_meaning(call: Call, meaning: Callable[..., Any]) -> None:
    """Register the meaning of a call in this process. Each process traces its programs itself."""
    _MEANINGS[call.options] = meaning


def meaning_of(call: Call, span: Span | None) -> Callable[..., Any]:
    """Return the Python function that computes a call. Raises TileError if the author gave none."""
    found = _MEANINGS.get(call.options)
    if found is None:
        raise error("foreign_meaning", call.span or span, name=function_of(call))
    return found


def _effects(call: Call) -> tuple[Access, ...]:
    """Return the accesses that the author declared for a foreign call."""
    found = []
    for operand, access in enumerate(str(call.options[1]).split("|")):
        kind, _, count = access.partition(" ")
        if kind and isinstance(call.args[operand], Address):
            found.append(Access(operand, kind, int(count)))
    return tuple(found)


declare(Intrinsic(NAME, -1, same, "", effects=_effects))
