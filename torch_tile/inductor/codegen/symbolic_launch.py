# SPDX-License-Identifier: Apache-2.0
"""Plan the launches of a tile op's call when sizes may be symbols. Kernels are compiled, nothing runs.

The entry functions of `kernels/` get fake tensors. These have dtype, device, sizes, strides and the low bits of the
address, and nothing else (runtime/launch_plan.py). This module uses torch's private parts, like compat.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from torch_tile.hardware import LARGEST_SIZE
from torch_tile.inductor import compat
from torch_tile.runtime.launch_plan import LaunchPlan, Unplanned, planning


class NotEmbedded(Exception):
    """A call that cannot be recorded as launches. `copies` is the number of the argument that it copies, if any."""

    def __init__(self, why: str, copies: int | None = None):
        super().__init__(why)
        self.copies = copies


class Symbols:
    """Stand-ins for Inductor's symbols, in an environment of their own that records every guard."""

    def __init__(self, real: Any):
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.real = real  # the environment that they come from
        self.env: ShapeEnv = ShapeEnv()
        self.here: dict[sympy.Symbol, sympy.Symbol] = {}  # Inductor's symbols to ours
        self.hints: dict[sympy.Symbol, int] = {}  # typical values of our symbols

    def number(self, expr: Any) -> Any:
        """Return a size of Inductor's as an int or a SymInt."""
        if isinstance(expr, torch.SymInt):
            expr = expr.node.expr
        if not isinstance(expr, sympy.Expr):
            return expr
        if expr.is_number:
            return int(expr)
        if not expr.is_integer:
            raise NotEmbedded(f"{expr} is a number known at run time only, and no size")
        expr = self.settled(expr)
        expr = expr.subs({each: self.symbol(each) for each in sorted(expr.free_symbols, key=str)})
        return self.env.create_symintnode(expr, hint=int(expr.subs(self.hints)))

    def settled(self, expr: Any) -> Any:
        """Replace each Min or Max in `expr` by one argument, if the bounds of its symbols decide."""
        from torch.utils._sympy.functions import Max, Min

        for each in expr.atoms(Min, Max):
            sign = 1 if isinstance(each, Min) else -1
            for x in each.args:
                if all(self.real.bound_sympy(sign * (y - x)).lower >= 0 for y in each.args):
                    expr = expr.subs(each, x)
                    break
        return expr

    def symbol(self, theirs: Any) -> Any:
        """Return our symbol for one of Inductor's, with the same typical value and maximum."""
        if theirs not in self.here:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic
            from torch.utils._sympy.value_ranges import ValueRanges

            bounds = self.real.bound_sympy(theirs)
            least = int(bounds.lower) if isinstance(bounds.lower, sympy.Integer) else 0
            most = min(int(bounds.upper), LARGEST_SIZE) if isinstance(bounds.upper, sympy.Integer) else LARGEST_SIZE
            typical = compat.size_hint(self.real.create_symintnode(theirs, hint=None), fallback=min(most, 64))
            made = self.env.create_symbol(
                typical, ConstantSource(f"n{len(self.here)}"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None,
                do_not_specialize_zero_one=True,
            )  # fmt: skip
            self.env.var_to_range[made] = ValueRanges(least, most)
            self.here[theirs], self.hints[made] = made, typical
        return self.here[theirs]

    def asked(self) -> list[Any]:
        """Return the recorded guards that do not follow from the symbols' bounds."""
        return [guard.expr for guard in self.env.guards]


class TensorMeta(NamedTuple):
    """A tensor as Inductor has it: sizes and strides may be expressions; `low` is its address modulo GRANULE.

    The tensor is `view` of it: (sizes, strides, offset), in elements, or the whole.
    """

    dtype: torch.dtype
    device: torch.device
    size: Sequence[Any]
    stride: Sequence[Any]
    low: int = 0
    view: tuple[Sequence[Any], Sequence[Any], Any] | None = None


class Recorded(NamedTuple):
    """The record of a call: a plan of launches on fake tensors, and the environment of the symbols in their sizes."""

    plan: LaunchPlan
    symbols: Symbols


def record(call: Callable[[list[torch.Tensor]], object], forms: Sequence[TensorMeta], symbols: Symbols) -> Recorded:
    """Plan `call` on fake tensors of `forms`, and compile its kernels.

    Raises NotEmbedded if the call does more than make views, empty tensors and launches. Raises it, too, if its
    launches depend on sizes known only at run time.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    plan = LaunchPlan()
    try:
        with compat.nested_compile():
            with FakeTensorMode(shape_env=symbols.env, allow_non_fake_inputs=False):
                for form in forms:
                    plan.add(fake(form, symbols.number), form.low)
                with planning(plan):
                    call(list(plan.roots))
            plan.require_launches_only()
            plan.compile()
    except NotEmbedded:
        raise
    except Unplanned as why:
        raise NotEmbedded(str(why), why.copies) from why
    except Exception as problem:
        try:
            plan.refuse_torch()  # the failure may depend on values that torch computes
        except Unplanned as why:
            raise NotEmbedded(str(why), why.copies) from problem
        raise NotEmbedded(f"{type(problem).__name__}: {problem}") from problem
    for launcher in (launch.kernel.launcher for launch in plan.launches):
        if launcher.out_idx or launcher.program.outputs or launcher.program.workspaces:
            raise NotEmbedded(f"{launcher.program.name} allocates what it returns")
    if asked := symbols.asked():
        theirs = {ours: each for each, ours in symbols.here.items()}
        shown = " and ".join(str(each.subs(theirs)) for each in asked)
        raise NotEmbedded(f"which kernel is right depends on sizes known at run time only: {shown}")
    return Recorded(plan, symbols)


def fake(form: TensorMeta, number: Callable[[Any], Any]) -> torch.Tensor:
    """Make a fake tensor of a form, in the active fake mode."""
    size, stride = (tuple(map(number, each)) for each in (form.size, form.stride))
    made = torch.empty_strided(size, stride, dtype=form.dtype, device=form.device)
    if form.view is None:
        return made
    size, stride = (tuple(map(number, each)) for each in form.view[:2])
    return made.as_strided(size, stride, number(form.view[2]))
