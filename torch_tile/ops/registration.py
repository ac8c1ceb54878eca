# SPDX-License-Identifier: Apache-2.0
"""Register declared operators with torch's dispatcher: schema, kernels, fake form, gradient, autocast, FLOP count.

After `import torch_tile` every op of the library exists. Registering takes about a millisecond an op. The first call of
an op imports its kernels and their compiler, which takes longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_tile.ops import sharding
from torch_tile.ops.checks import FLOATING
from torch_tile.ops.eager import Eager
from torch_tile.ops.namespace import Namespace
from torch_tile.ops.registry import FORMS, OPERATORS, Operator, P, R, checked, checked_op, entry, form, in_torch
from torch_tile.ops.sharded_backward import sharded
from torch_tile.ops.when_imported import when_imported
from torch_tile.torch_transforms import autograd_kernel, entry_by_entry, refuse_tangents

SCHEMAS: dict[str, str] = {}
"""The schema of each op that is registered, by name. All ops are functional: they return fresh dense tensors that never
alias an input. Those are contiguous, except that what attention and mla_decode return lies in memory as their queries
do (kernels/attention/arguments.py)."""


class _Library(torch.library.Library):
    """Ops without forward-mode derivatives: torch would drop tangents without a word where no gradient is wanted."""

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any) -> None:
        """Register as torch does. Autograd's kernels refuse forward-mode tangents."""
        kernel = _without_tangents(op_name, fn) if dispatch_key == "Autograd" else fn
        super().impl(op_name, kernel, dispatch_key, **options)  # type: ignore[no-untyped-call]

    def _register_fake(self, op_name: str, fn: Callable[..., Any], _stacklevel: int = 1, **options: Any) -> None:
        """Register a fake form as torch does, but name this file as its source, whose look-up is slow for all."""
        entry = torch._library.simple_registry.singleton.find(f"{self.ns}::{op_name}")
        self._registration_handles.append(entry.fake_impl.register(fn, __file__, lib=self, **options))


def _without_tangents(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an autograd kernel so that it refuses forward-mode tangents."""
    name = f"tile.{name.removeprefix('tile::')}"

    def call(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        refuse_tangents(name, args)
        return kernel(keys, *args)

    return call


LIBRARY: torch.library.Library = _Library("tile", "DEF")  # type: ignore[no-untyped-call]
torch.ops.tile.__class__ = Namespace


def declare(name: str, args: Callable[P, Any], result: type[R], doc: str, **declaration: Any) -> Callable[P, R]:
    """Register an operator by its class of arguments, of tensors; return its documented form.

    result: the type of what the operator returns. doc: its documentation. declaration: as for `register`.
    """
    made = form(name, args, result, doc)
    register(name=name, args=getattr(args, "__origin__", args), form=made, **declaration)
    return made


def register(**declaration: Any) -> Operator:
    """Declare an operator, by the fields of `Operator`, and put it on torch's dispatcher.

    `module` names a module of kernels: its entry function of the operator's name is the operator's `run`. Its
    `reference` is the reference, where the declaration has none.
    """
    if module := declaration.pop("module", None):
        declaration.setdefault("run", entry(module, declaration["name"], *declaration.get("returns", ("out",))))
        declaration.setdefault("reference", in_torch(module))
    operator = Operator(**declaration)
    if operator.name in OPERATORS:
        raise ValueError(f"tile.{operator.name} is declared twice")
    OPERATORS[operator.name] = operator
    SCHEMAS[operator.name] = operator.schema
    if operator.form is not None:
        FORMS[operator.name] = checked(operator, operator.form)
    # flexible_layout: the kernels address any strides, so Inductor need not copy inputs into the strides eager has.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    LIBRARY.define(operator.name + operator.schema, tags=tags)
    packet = getattr(torch.ops.tile, operator.name)
    packet._op = checked_op(operator, packet._op)
    torch.jit._builtins._register_builtin(packet._op, f"tile::{operator.name}")
    _register_forward(operator)
    _register_gradient(operator)
    if operator.lower_precision:
        for device in ("cpu", "cuda"):
            _register_autocast(operator.overload, device, operator.lower_precision, None)
    if operator.full_precision_cuda:
        _register_autocast(operator.overload, "cuda", operator.args._fields, torch.float32)  # type: ignore[attr-defined]
    if operator.flops is not None:
        when_imported("torch.utils.flop_counter", functools.partial(_register_flops, operator, operator.flops))
    sharding.register(operator)
    return operator


def _register_forward(operator: Operator) -> None:
    """Register the eager kernel and the fake form; eager.py finds what computes the op by its name."""
    fake = _with_tensors(operator.overload, lambda *args: operator.fake(operator.args(*args)))
    check = operator.check_values
    check_values = None if check is None else lambda *args: check(operator.args(*args))
    LIBRARY.impl(operator.name, Eager(operator.name, fake, check_values), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tile::{operator.name}", fake, lib=LIBRARY)
    torch.library.register_vmap(
        operator.overload, functools.partial(entry_by_entry, operator.overload, ()), lib=LIBRARY
    )


def _register_gradient(operator: Operator) -> None:
    """Register an operator's gradient with autograd."""
    if operator.in_training is not None:
        in_training = operator.in_training
        kernel = _autograd(operator.overload, lambda *args: in_training(operator.args(*args)))
        LIBRARY.impl(operator.name, kernel, "Autograd", with_keyset=True)
    if operator.backward is not None:

        def make_gradient() -> tuple[Callable[..., None], Callable[..., Any]]:
            setup_context, backward = sharded(operator)
            return setup_context, lambda ctx, *grads: backward(ctx, *grads)[: len(ctx.needs_input_grad)]

        LIBRARY.impl(operator.name, autograd_kernel(operator.overload, make_gradient), "Autograd", with_keyset=True)


def _register_flops(operator: Operator, flops: Callable[[Any], int]) -> None:
    """Register an operator's FLOP formula with torch's FLOP counter."""
    from torch.utils.flop_counter import register_flop_formula

    def formula(*args: Any, out_shape: Any = None, **named: Any) -> int:
        return flops(operator.args(*args, **named))

    register_flop_formula(operator.overload._overloadpacket)(formula)


def _with_tensors(op: torch._ops.OpOverload, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fake` so that it refuses None for a tensor of the schema, since torch does not."""
    wanted = [(i, a.name) for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor"]

    @functools.wraps(fake)
    def call(*args: Any) -> Any:
        for i, name in wanted:
            if args[i] is None:
                raise TypeError(f"tile.{op._opname}: {name} is None; expected a tensor")
        return fake(*args)

    return call


def _autograd(op: torch._ops.OpOverload, in_training: Callable[..., Any]) -> Callable[..., Any]:
    """Make the autograd kernel of an op that another op replaces if a gradient is wanted."""

    def call(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        given = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,))]
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            return in_training(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    return call


def _register_autocast(
    op: torch._ops.OpOverload, device: str, names: tuple[str, ...], dtype: torch.dtype | None
) -> None:
    """Cast, under autocast on `device`, the floating tensors among `names` to `dtype` (None: autocast's own).

    `torch.library.register_autocast` would fix the dtype at registration. Like torch's, the rule leaves float64 and
    tensors of other devices alone, and float8; unlike torch's, casts of parameters are not cached for the region.
    """
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    exclude = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    positions = frozenset(i for i, a in enumerate(op._schema.arguments) if a.name in names)

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            eligible = value.dtype in FLOATING and value.device.type == device and value.dtype != torch.float64
            return value.to(to) if eligible else value
        return [cast(v, to) for v in value] if isinstance(value, list) else value

    def autocast(*args: Any) -> Any:
        """Call the operator with its named arguments in the dtype of autocast."""
        to = torch.get_autocast_dtype(device) if dtype is None else dtype
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return op(*(cast(a, to) if i in positions else a for i, a in enumerate(args)))

    LIBRARY.impl(op._schema.name.removeprefix("tile::"), autocast, key)
