# SPDX-License-Identifier: Apache-2.0
"""T.atomic_add, atomic_max, atomic_min: updates of memory that several blocks may make at once.

A region takes a region or a scalar; each element is one atomic update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..diagnostics import Diagnostic, diagnose, error
from ..intrinsics.memory import atomic
from ..ir import dtype as dt
from ..ir.buffer import Region
from ..ir.expr import Address, Call, Expr, Load, cast, is_number
from ..ir.stmt import Do, Stmt
from .base import RegisteredOp, describe, parallel, region_of, same_extents, scalar, spread, squeezed, tile_op
from .copy import _extend
from .threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from ..interp.env import Env


@dataclass(frozen=True, eq=False, repr=False)
class Atomic(RegisteredOp):
    """`dst = fold(dst, value)` as one indivisible update per element."""

    kind: ClassVar[str] = ""
    dst: Region
    value: Region | Expr

    @classmethod
    def build(cls, dst: Any, value: Any, memory_order: str | None = None, **hints: Any) -> Atomic:
        """`dst` is an element, a slice or a buffer; `value` a scalar, or a region of the same shape."""
        target = region_of(dst)
        if target is None:
            raise error("atomic_target", None, op=cls.op_name, got=type(dst).__name__)
        source = None if isinstance(value, Expr) or is_number(value) else region_of(value)
        if source is None:
            return cls(target, scalar(value, f"T.{cls.op_name}", target.buffer.dtype))
        if isinstance(dst, Load):
            target = _extend(target, source)
        return cls(target, source)

    def check(self) -> list[Diagnostic]:
        """A region value must have the destination's extents."""
        if isinstance(self.value, Expr) or same_extents(squeezed(self.dst), squeezed(self.value)):
            return []
        src, dst = describe(self.value.extents), describe(self.dst.extents)
        return [diagnose("copy_shape", self.span, src=src, dst=dst)]

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Reads and writes the destination, reads a region value."""
        return [self.dst] + ([] if isinstance(self.value, Expr) else [self.value]), [self.dst]

    def lower_cpu(self) -> Stmt:
        """One atomic helper call per element."""
        return self._each(lambda where, value: Call("cpu_atomic", (where, value), dt.int32, (self.kind,)))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """A value fragment stays where it is: each thread updates memory with what it holds."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """One atomic operation per element."""
        return self._each(lambda where, value: atomic(where, value, self.kind))

    def _each(self, update: Callable[[Address, Expr], Expr]) -> Stmt:
        """`update` for every element, side by side."""
        target = self.dst.buffer

        def one(point: tuple[Any, ...]) -> Stmt:
            value = self.value
            if not isinstance(value, Expr):
                value = cast(Load(value.buffer, spread(value, point)), target.dtype)
            return Do(update(Address(target, spread(self.dst, point)), value))

        extents = squeezed(self.dst)
        return parallel(extents, one) if extents else one(())

    def evaluate(self, env: Env) -> None:
        """Blocks run one after another here, so a plain update is atomic; computed in float64 or int64."""
        import torch

        old = env.read(self.dst)
        if isinstance(self.value, Expr):
            new = env.full(env.extents(self.dst), env.value(self.value), self.dst.buffer.dtype)
        else:
            new = env.read(self.value).to(old.dtype).reshape(old.shape)
        fold: Any = {"add": torch.add, "max": torch.maximum, "min": torch.minimum}[self.kind]
        wide = env.wide(self.dst.buffer.dtype)
        env.write(self.dst, fold(old.to(wide), new.to(wide)).to(old.dtype))


def _declare(kind: str) -> type[Atomic]:
    cls = type(f"Atomic{kind.capitalize()}", (Atomic,), {"kind": kind, "__doc__": Atomic.__doc__})
    return tile_op(f"atomic_{kind}")(dataclass(frozen=True, eq=False, repr=False)(cls))


ATOMICS = {k: _declare(k) for k in ("add", "max", "min")}
globals().update({cls.__name__: cls for cls in ATOMICS.values()})  # where pickle looks for them
