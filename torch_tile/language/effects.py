# SPDX-License-Identifier: Apache-2.0
"""Effects of the language that are neither loops nor tile ops: printing, assertions, raw calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics import lookup
from torch_tile.intrinsics.base import is_pure
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import TensorMap
from torch_tile.ir.expr import Address, Call, Const, Expr, Var, is_number, to_expr, truth
from torch_tile.ir.node import contains, find, walk
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Assert, Do, Print
from torch_tile.language.trace import tracer
from torch_tile.language.values import Handle, dtype_of
from torch_tile.options import pass_options, switched_on
from torch_tile.tileop.base import Scalar, Tile, region_of


def print(value: Tile | Scalar | None = None, msg: str = "", warp_group_id: int = 0, warp_id: int = 0) -> None:
    """Print a scalar or a whole buffer or region from inside the kernel, once per block, after the text `msg`.

    T.print(msg="text") prints the text alone.

    TileLang's `warp_group_id` and `warp_id`, of the warp that prints, are 0: TileError otherwise.
    """
    at = tracer("T.print")
    if isinstance(value, str) and not isinstance(msg, str):
        fix = "the value comes first, and one text behind it: T.print(value, 'text'); each value is a call of its own"
        raise error("bad_argument", None, op="T.print", name="value", why="is a text", fix=fix)
    for name, number in (("warp_group_id", warp_group_id), ("warp_id", warp_id)):
        if not is_number(number) or number != 0:
            why, fix = f"is {number!r}", "leave it out: a block prints once, whichever warp does"
            raise error("bad_argument", None, op="T.print", name=name, why=why, fix=fix)
    if isinstance(value, str) and not msg:
        raise error("bad_argument", None, op="T.print", name="value", why="is a string", fix="T.print(value, msg=...)")
    if value is None and msg:
        at.emit(Print(msg, None))
        return
    scalar = isinstance(value, Expr) or is_number(value)
    shown = to_expr(value) if scalar else region_of(value)
    if shown is None:
        fix = "give a scalar or a buffer"
        raise error("bad_argument", None, op="T.print", name="value", why=f"is {type(value).__name__}", fix=fix)
    at.emit(Print(msg, shown))


def annotate_pass_configs(configs: Mapping[str, Any]) -> None:
    """Set compiler options, `configs`, for the whole function, as `pass_configs` of torch_tile.jit does.

    An option holds if either place sets it. Raises TileError for unknown keys.
    """
    at = tracer("T.annotate_pass_configs")
    at.switches |= switched_on(pass_options("T.annotate_pass_configs", pass_configs=configs))


def annotate_compile_flags(flags: str | Sequence[str]) -> None:
    """Give flags for the device compiler, for the whole function, as `compile_flags` of torch_tile.jit does."""
    at = tracer("T.annotate_compile_flags")
    given = flags if isinstance(flags, str) else list(flags)
    at.switches |= switched_on(pass_options("T.annotate_compile_flags", compile_flags=given))
    at.compile_flags += given.split() if isinstance(given, str) else given


def device_assert(condition: Any, msg: str = "", no_stack_info: bool = False) -> None:
    """Stop the kernel with `msg` unless `condition` holds; the launch then raises. `no_stack_info` has no effect."""
    if isinstance(condition, str):
        fix = "the condition comes first, and the text behind it: T.device_assert(x > 0, 'text')"
        raise error("bad_argument", None, op="T.device_assert", name="condition", why="is a text", fix=fix)
    tracer("T.device_assert").emit(Assert(truth(condition, "T.device_assert"), msg))


def assume(condition: Any) -> None:
    """Promise a condition. One of sizes and scalar parameters alone, outside of loops and branches, is checked at each
    launch: LaunchError where it does not hold. Others are not checked, but known to be false is an error at once.
    """
    at = tracer("T.assume")
    known = simplify(truth(condition, "T.assume"))
    if isinstance(known, Const) and not known.value:
        fix = "mend the condition, or leave it out"
        raise error("bad_argument", None, op="T.assume", name="condition", why="never holds", fix=fix)
    if len(at.scopes) <= 1 and is_of_launch(known):
        at.assumed.append(known)


def is_of_launch(condition: Expr) -> bool:
    """Return whether a condition is of sizes and scalar parameters alone, so that a launch can check it."""
    symbols = [node for node in walk(condition) if node.is_symbol]
    of_host = all(isinstance(node, Var) and node.role in ("dim", "param") for node in symbols)
    return bool(symbols) and of_host and not contains(condition, Call)


def acts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of the language that records statements besides its value, which a statement may then drop."""
    function.does_act = True  # type: ignore[attr-defined]
    return function


def address_of(element: Any) -> Expr:
    """Return the address of an element, as an operand of target-level calls."""
    region = region_of(element)
    if region is None or isinstance(element, Handle):
        raise error("bad_operand", None, op="T.address_of", got=repr(element)[:60])
    return Address(region.buffer, region.starts)


def call(name: str, *operands: Any, dtype: Any = "int32", options: tuple[Any, ...] = ()) -> Expr:
    """Call a target-level helper by `name` on `operands`, with `options`, as printed in lowered kernels."""
    return Call(lookup(name).name, tuple(to_expr(a) for a in operands), dtype_of(dtype), options)


def tensor_map(buffer: Any, sizes: Any, strides: Any, box: tuple[int, ...], swizzle: int = 0) -> Expr:
    """Describe the tensor `buffer` to the TMA, as in printed kernels: an operand of target-level calls.

    `sizes`, `strides` and `box` have one entry per dimension, outermost first, in elements; `box` is moved by one copy.
    The rows of a box lie in shared memory, swizzled over `swizzle` bytes.
    """
    region = region_of(buffer)
    if region is None or region.buffer.scope != "global":
        raise error("bad_operand", None, op="T.tensor_map", got=repr(buffer)[:60])
    extents, steps = (tuple(to_expr(x) for x in given) for given in (sizes, strides))
    return TensorMap(region.buffer, extents, steps, tuple(box), swizzle)


def evaluate(value: Scalar | None) -> None:
    """Evaluate a call for its effect. Operations without a value, such as T.copy, are already recorded.

    Another value has no effect, and is dropped: `T.evaluate(0)` does nothing.
    """
    at = tracer("T.evaluate")
    if isinstance(value, Call):
        at.emit(Do(value))
    elif value is not None:
        for call in find(to_expr(value, op="T.evaluate"), Call):
            if not is_pure(call):
                at.emit(Do(call))


__all__ = [
    "address_of", "annotate_compile_flags", "annotate_pass_configs", "assume", "call", "device_assert", "dt",
    "evaluate", "print", "tensor_map",
]  # fmt: skip
