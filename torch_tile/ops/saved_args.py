# SPDX-License-Identifier: Apache-2.0
"""Save a call's arguments for its gradient, and restore them there.

Tensors are saved in the schema's order, lists laid out flat, as sharding rules name them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

from torch_tile.ops.registry import hints_of


@functools.cache
def tensor_fields(kind: Any) -> dict[str, bool]:
    """Return the arguments that hold tensors, of a class of arguments, and whether each is a list of tensors."""
    hints = {name: hints_of(kind)[name] for name in kind._fields}
    return {name: _is_list(hint) for name, hint in hints.items() if _holds_tensors(hint)}


def _holds_tensors(hint: Any) -> bool:
    """Return whether an annotation names the generic type that stands for a tensor."""
    return isinstance(hint, TypeVar) or any(map(_holds_tensors, get_args(hint)))


def _is_list(hint: Any) -> bool:
    """Return whether an annotation is a sequence, or a sequence or None."""
    return any(get_origin(each) is Sequence for each in (hint, *get_args(hint)))


def save_args(ctx: Any, args: Any, *results: Any) -> None:
    """Save the arguments of a call, and `results` of it, for its gradient."""
    kind: Any = type(args)
    tensors: list[Any] = []
    emptied: dict[str, Any] = {}
    for name, is_list in tensor_fields(kind).items():
        value = getattr(args, name)
        tensors += (value or ()) if is_list else [value]
        emptied[name] = [None] * len(value) if is_list and value is not None else None
    ctx.args = args._replace(**emptied)
    ctx.save_for_backward(*tensors, *results)


def restored_args(ctx: Any, tensors: Sequence[Any] | None = None) -> tuple[Any, list[Any]]:
    """Return the arguments and the results that `save_args` saved, with `tensors` in place of those that were saved."""
    left = iter(ctx.saved_tensors if tensors is None else tensors)
    kind: Any = type(ctx.args)
    found: dict[str, Any] = {}
    for name, is_list in tensor_fields(kind).items():
        empty = getattr(ctx.args, name)
        if is_list:
            found[name] = None if empty is None else [next(left) for _ in empty]
        else:
            found[name] = next(left)
    return ctx.args._replace(**found), list(left)


def needs_of(ctx: Any, args: Any) -> Any:
    """Return which arguments want a gradient, as an object of the class `args`; None for those left to defaults."""
    return args(*ctx.needs_input_grad, *[None] * (len(args._fields) - len(ctx.needs_input_grad)))
