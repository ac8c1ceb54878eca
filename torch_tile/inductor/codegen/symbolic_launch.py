# SPDX-License-Identifier: Apache-2.0
"""What a call of a tile op launches, found out without tensors: kernels are chosen and compiled, nothing is run.

The entry functions of `kernels/` are called with outlines: tensors of which dtype, device, sizes, strides and the low
bits of the address are known, and nothing else. Sizes may be symbols. Private to torch, like compat.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torch_tile.inductor import compat
from torch_tile.runtime import launch
from torch_tile.runtime.replay import EMPTY, OF_FORMS

FAR = 1 << 44  # bytes between the made-up addresses of two tensors
LARGEST = 2**31 - 2**16  # of a symbol: kernels take sizes as 32 bits


class NotEmbedded(Exception):
    """Why a call cannot be written down as launches. `copies`: the argument, by its number, that it makes a copy of."""

    def __init__(self, why: str, copies: int | None = None):
        super().__init__(why)
        self.copies = copies


class Outline(torch.Tensor):
    """A tensor without memory. `root` numbers the tensor that it is a view of, and `fake` knows all but that."""

    fake: torch.Tensor
    root: int
    low: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, fake: torch.Tensor, root: int, low: int) -> Outline:
        """`low`: the address of the root modulo GRANULE."""
        made: Outline = torch.Tensor._make_wrapper_subclass(
            cls, fake.shape, strides=fake.stride(), storage_offset=fake.storage_offset(), dtype=fake.dtype,
            device=fake.device, layout=fake.layout,
        )  # fmt: skip
        made.fake, made.root, made.low = fake, root, low
        return made

    @property
    def offset(self) -> Any:
        """Bytes from the beginning of the root."""
        return self.fake.storage_offset() * self.fake.element_size()

    def data_ptr(self) -> Any:
        """An address that is right modulo GRANULE."""
        return (self.root + 1) * FAR + self.low + self.offset

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only a `Watch` computes with outlines."""
        raise NotEmbedded(f"torch is asked for {op}")


class Call(NamedTuple):
    """A kernel's launcher, and what it is called with: outlines and numbers."""

    launcher: launch.BaseLauncher
    args: tuple[Any, ...]


class Watch(TorchDispatchMode):
    """Computes views and empty tensors, refuses all else, and keeps what is launched."""

    def __init__(self, fake_mode: Any, count: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode, self.count = fake_mode, count
        self.made: list[torch.Tensor] = []  # the empty tensors, whose roots are numbered after `count` others
        self.calls: list[Call] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name
        if name in OF_FORMS:
            return op(*args, **(kwargs or {}))
        found: list[Outline] = []
        unwrap = lambda x: found.append(x) or x.fake  # type: ignore[func-returns-value]  # noqa: E731
        plain, named = tree_map_only(Outline, unwrap, (args, kwargs or {}))
        if name not in EMPTY and (op._schema.is_mutable or not found):
            raise NotEmbedded(f"torch is asked for {name}")
        with self.fake_mode:
            result = op(*plain, **named)
        if name in EMPTY:
            self.made.append(result)
            return Outline(result, self.count + len(self.made) - 1, 0)
        origin = found[0]
        memory = origin.fake.untyped_storage()._cdata

        def wrap(x: torch.Tensor) -> Outline:
            if x.untyped_storage()._cdata != memory:
                raise NotEmbedded(f"torch is asked for {name}", origin.root if name == "aten::clone" else None)
            return Outline(x, origin.root, origin.low)

        return tree_map_only(torch.Tensor, wrap, result)

    def launched(self, launcher: launch.BaseLauncher, args: Sequence[Any]) -> None:
        """A kernel is called."""
        if launcher.out_idx or launcher.program.outputs or launcher.program.workspaces:
            raise NotEmbedded(f"{launcher.program.name} allocates what it returns")
        self.calls.append(Call(launcher, tuple(args)))


class Symbols:
    """Symbols of Inductor's, in an environment of their own, where what is asked of them is written down."""

    def __init__(self, real: Any):
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.real = real  # the environment that they come from
        self.env = ShapeEnv()
        self.here: dict[sympy.Symbol, sympy.Symbol] = {}  # theirs to ours
        self.hints: dict[sympy.Symbol, int] = {}  # typical values of ours

    def number(self, expr: Any) -> Any:
        """A size of Inductor's as an int or a SymInt."""
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
        """`expr` with the argument in place of a Min or Max that it is within the bounds of its symbols."""
        from torch.utils._sympy.functions import Max, Min

        for each in expr.atoms(Min, Max):
            sign = 1 if isinstance(each, Min) else -1
            for x in each.args:
                if all(self.real.bound_sympy(sign * (y - x)).lower >= 0 for y in each.args):
                    expr = expr.subs(each, x)
                    break
        return expr

    def symbol(self, theirs: Any) -> Any:
        """Ours for one of theirs: as large, typically and at most."""
        if theirs not in self.here:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic
            from torch.utils._sympy.value_ranges import ValueRanges

            bounds = self.real.bound_sympy(theirs)
            least = int(bounds.lower) if isinstance(bounds.lower, sympy.Integer) else 0
            most = min(int(bounds.upper), LARGEST) if isinstance(bounds.upper, sympy.Integer) else LARGEST
            typical = compat.size_hint(self.real.create_symintnode(theirs, hint=None), fallback=min(most, 64))
            made = self.env.create_symbol(
                typical, ConstantSource(f"n{len(self.here)}"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None,
                do_not_specialize_zero_one=True,
            )  # fmt: skip
            self.env.var_to_range[made] = ValueRanges(least, most)
            self.here[theirs], self.hints[made] = made, typical
        return self.here[theirs]

    def asked(self) -> list[Any]:
        """What has been found true of them and does not follow from their bounds."""
        return [guard.expr for guard in self.env.guards]


class Form(NamedTuple):
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
    """What a call comes to: kernels' calls on outlines, the empty tensors that it made, whose roots are numbered from
    `given` on, and the environment of the symbols.
    """

    calls: tuple[Call, ...]
    made: tuple[torch.Tensor, ...]
    given: int
    symbols: Symbols


def record(call: Callable[[list[Outline]], object], forms: Sequence[Form], symbols: Symbols) -> Recorded:
    """Call `call` with outlines of `forms`, and keep what it launches.

    Raises NotEmbedded where it does anything but to make views, empty tensors and launches, or where what it does
    depends on sizes that are known at run time only.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(shape_env=symbols.env, allow_non_fake_inputs=False)
    with compat.isolated_compile():
        outlines = [outline(form, root, symbols.number, mode) for root, form in enumerate(forms)]
        watch = Watch(mode, len(forms))
        with instead_of_launching(watch.launched), watch:
            try:
                call(outlines)
            except NotEmbedded:
                raise
            except Exception as problem:
                raise NotEmbedded(f"{type(problem).__name__}: {problem}") from problem
    if not watch.calls:
        raise NotEmbedded("nothing is launched")
    if asked := symbols.asked():
        theirs = {ours: each for each, ours in symbols.here.items()}
        shown = " and ".join(str(each.subs(theirs)) for each in asked)
        raise NotEmbedded(f"which kernel is right depends on sizes known at run time only: {shown}")
    return Recorded(tuple(watch.calls), tuple(watch.made), len(forms), symbols)


def outline(form: Form, root: int, number: Callable[[Any], Any], mode: Any) -> Outline:
    """The outline of one tensor."""
    size, stride = (tuple(map(number, each)) for each in (form.size, form.stride))
    with mode:
        fake = torch.empty_strided(size, stride, dtype=form.dtype, device=form.device)
        if form.view is not None:
            size, stride = (tuple(map(number, each)) for each in form.view[:2])
            fake = fake.as_strided(size, stride, number(form.view[2]))
    return Outline(fake, root, form.low)


@contextlib.contextmanager
def instead_of_launching(by: Callable[[launch.BaseLauncher, Sequence[Any]], None]) -> Iterator[None]:
    """In this thread, calls of kernels go to `by`."""
    before, launch.noted.by = launch.noted.by, by
    try:
        yield
    finally:
        launch.noted.by = before
