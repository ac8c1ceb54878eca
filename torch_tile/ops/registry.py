# SPDX-License-Identifier: Apache-2.0
"""The declarations of all operators.

One file declares an operator once. The declaration has its arguments, checks, results, kernels, reference in plain
torch, gradient, sharding, cost and documentation. Schemas, launchers, DTensor's rules, FLOP counts, Inductor's
lowerings and the documented Python forms are derived from the declarations.

The arguments are a named tuple, generic in the type that stands for a tensor. So one class types the op's arguments and
the graph nodes of a call. It also types the shapes for a cost and the specs for a sharding rule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from types import UnionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from torch_tile.diagnostics.arguments import explained
from torch_tile.kernels import kernels
from torch_tile.ops.sharding_rule import Rule
from torch_tile.runtime.launch_plan import LaunchPlan, has_memory, planning

if TYPE_CHECKING:
    from torch_tile.kernels.common import Machine

V = TypeVar("V")
"""What stands for a tensor: a tensor, a node of a graph, a shape, or a spec with a shape."""
P = ParamSpec("P")
R = TypeVar("R")

Shape = Sequence[int]

SCALARS = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType", torch.SymInt: "SymInt"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Operator:
    """The declaration of `torch.ops.tile.NAME`. Functions get the arguments as one object, of the class `args`.

    args: a named tuple, generic in V, whose annotations and defaults make the schema: `V`, `V | None`, `Sequence[V]`,
    `Sequence[V] | None`, `Sequence[int]`, `bool`, `int`, `int | torch.SymInt`, `float`, `float | None`, `str`,
    `torch.dtype`, and `torch.dtype | None`. returns: names of the results, () for one result without a name.
    fake: checks the arguments and makes empty results, shapes maybe symbolic. check_values: refuses values of tensors
    that hold some. run: `run(args, out)` computes the results into `out`, a tensor or a tuple.
    reference: the results in plain torch. as_aten: the results in the operations that Inductor compiles best.
    setup_context, backward: as for `torch.library.register_autograd`, the inputs as `args`; backward returns
    `op_gradients`. Without a setup_context, all arguments are saved, for `restored_args`.
    in_training: instead of these, computes the results where a gradient is wanted.
    sharding: the rule of a call, whose tensors have a `shape` and maybe nothing else.
    flops: operations of the products, from shapes; masked products count, as in torch's formulas. least_flops: without
    those that a kernel may skip. None where no cost is known.
    lower_precision: arguments that autocast casts to its dtype. full_precision_cuda: autocast casts all to float32, on
    CUDA only (torch's CPU autocast leaves norms and softmax alone).
    form: the documented Python function, None where the operator is internal.
    """

    name: str
    args: Callable[..., Any]
    returns: tuple[str, ...] = ()
    fake: Callable[[Any], Any]
    run: Callable[[Any, Any], None]
    reference: Callable[[Any], Any]
    sharding: Callable[[Any], Rule]
    check_values: Callable[[Any], None] | None = None
    setup_context: Callable[[Any, Any, Any], None] | None = None
    backward: Callable[..., tuple[Any, ...]] | None = None
    in_training: Callable[[Any], Any] | None = None
    as_aten: Callable[[Any], Any] | None = None
    lower_precision: tuple[str, ...] = ()
    full_precision_cuda: bool = False
    flops: Callable[[Any], int] | None = None
    least_flops: Callable[[Any], int] | None = None
    form: Callable[..., Any] | None = None

    @property
    def overload(self) -> Any:
        """Return `torch.ops.tile.NAME.default`."""
        return getattr(torch.ops.tile, self.name).default

    @functools.cached_property
    def schema(self) -> str:
        """Return the arguments and results in torch's schema language."""
        results = ", ".join(f"Tensor {name}" for name in self.returns)
        return f"{arguments_of(self.args)} -> {f'({results})' if self.returns else 'Tensor'}"

    def plan(self, args: Any, machine: Machine | None = None) -> LaunchPlan:
        """Plan the launches of a call. Nothing is computed, and no kernel is compiled yet.

        args: tensors of known sizes, maybe fake ones, and numbers. machine: what to plan for, else where tensors lie.
        Raises what the operator's checks raise.
        """
        from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

        from torch_tile.hardware import VECTOR_BYTES

        plan = LaunchPlan(machine=machine)

        def alike(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return [alike(each) for each in x]
            if not isinstance(x, torch.Tensor):
                return x
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            plan.add(made, x.data_ptr() % VECTOR_BYTES if has_memory(x) else 0)
            return made

        with torch.no_grad(), FakeTensorMode():
            given = self.args(*map(alike, args))
            out = self.fake(given)
            for each in out if isinstance(out, tuple) else (out,):
                plan.add(each)
            with planning(plan), suppress(DataDependentOutputException):  # of plain torch, which reads tensors' values
                self.run(given, out)
        return plan

    def minimal_flops(self, args: Any) -> int:
        """Return the number of operations that no kernel can skip. `args` hold shapes."""
        count = self.least_flops or self.flops
        if count is None:
            raise ValueError(f"tile.{self.name} has no cost")
        return count(args)


OPERATORS: dict[str, Operator] = {}
"""All declared operators, by name."""

FORMS: dict[str, Callable[..., Any]] = {}
"""The documented Python functions, by name: what `torch_tile.ops` offers."""


def documented(function: Callable[P, R]) -> Callable[P, R]:
    """Offer a function that is no declared operator's form as `torch_tile.ops.NAME`."""
    FORMS[function.__name__] = explained(function, lambda: function)
    return FORMS[function.__name__]


def operator_of(target: Any) -> Operator | None:
    """Return the operator that a graph's node calls by `target`, or None for other targets."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "tile":
        return None
    return OPERATORS.get(target._opname)


def arguments_of(args: Any) -> str:
    """Return the arguments of a schema, from the annotations and defaults of a named tuple."""
    hints, defaults = hints_of(args), args._field_defaults
    given = (f"{_type(hints[name], name)} {name}{_default(name, defaults)}" for name in args._fields)
    return f"({', '.join(given)})"


hints_of = functools.cache(get_type_hints)


def _type(hint: Any, name: str) -> str:
    """Return an annotation as a type of torch's schema language."""
    if isinstance(hint, TypeVar):
        return "Tensor"
    if hint in SCALARS:
        return SCALARS[hint]
    if get_origin(hint) is Sequence:
        return f"{_type(get_args(hint)[0], name)}[]"
    if get_origin(hint) in (Union, UnionType):
        members = [x for x in get_args(hint) if x is not type(None)]
        if len(members) == 1:
            return f"{_type(members[0], name)}?"
        if set(members) == {int, torch.SymInt}:
            return "SymInt"
    raise TypeError(f"the argument {name} is annotated with {hint}, which no schema has; see Operator.args")


def _default(name: str, defaults: dict[str, Any]) -> str:
    """Return the default of an argument in torch's schema language."""
    if name not in defaults:
        return ""
    value = list(defaults[name]) if isinstance(defaults[name], tuple) else defaults[name]
    return f'="{value}"' if isinstance(value, str) else f"={value}"


def op_gradients(args: Any, **found: Any) -> tuple[Any, ...]:
    """Return gradients in the order of an operator's arguments, with None for all arguments that are not named."""
    return tuple(args(**{**dict.fromkeys(args._fields), **found}))


def entry(module: str, name: str, *results: str, **fixed: Any) -> Callable[[Any, Any], None]:
    """Make a `run` that calls entry function `name` of a module of kernels with the op's arguments and `fixed`.

    `results` are the entry function's parameters for its outputs. The module is imported at the first call.
    """

    def run(args: Iterable[Any], out: Any) -> None:
        made = out if isinstance(out, tuple) else (out,)
        getattr(kernels(module), name)(*args, **fixed, **dict(zip(results, made, strict=True)))

    return run


def in_torch(module: str, name: str = "reference", only_first: bool = False, **fixed: Any) -> Callable[[Any], Any]:
    """Make a `reference` that calls function `name` of a module of kernels with the op's arguments and `fixed`."""

    def reference(args: Iterable[Any]) -> Any:
        result = getattr(kernels(module), name)(*args, **fixed)
        return result[0] if only_first else result

    return reference


def no_flops(args: Any) -> int:
    """Return 0, the cost of an operator without products."""
    return 0


def form(name: str, args: Callable[P, Any], result: type[R], doc: str) -> Callable[P, R]:
    """Make the documented Python function of an operator, with the parameters of `args`.

    args: a class of arguments, of tensors. result: the type of what the operator returns. doc: its documentation.
    """
    found: Any = getattr(args, "__origin__", args)

    def call(*given: P.args, **named: P.kwargs) -> R:
        filled = found(*given, **named)  # no subscript, which Dynamo does not trace
        made: R = getattr(torch.ops.tile, name).default(*map(as_listed, filled))
        return made

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    call.__signature__ = _signature(found, result)  # type: ignore[attr-defined]
    return call


_KEPT = (bool, list, tuple, torch.dtype)
"""Types of values that torch takes as they are, or refuses."""


def checked(operator: Operator, form: Callable[P, R]) -> Callable[P, R]:
    """Wrap an operator's Python form: refuse arguments that torch would silently take as another kind."""
    names = list(inspect.signature(form).parameters)
    return explained(form, lambda: form, _check_kinds(operator, names), _exchange(operator, names))


def checked_op(operator: Operator, op: Callable[..., Any]) -> Callable[..., Any]:
    """Let the function behind `torch.ops.tile.NAME` refuse these values, too, and name its arguments."""

    def described() -> Callable[..., Any]:
        """Return a function with the operator's signature; at the first error, as it takes a while for all."""
        own = lambda: None  # noqa: E731
        own.__qualname__ = f"tile.{operator.name}"
        own.__signature__ = _signature(operator.args, object)  # type: ignore[attr-defined]
        return own

    names = list(hints_of(operator.args))
    return explained(op, described, _check_kinds(operator, names), _exchange(operator, names))


def _exchange(operator: Operator, names: Sequence[str]) -> Callable[[Sequence[Any], dict[str, Any]], str]:
    """Make the remark on a refused call: which two tensors fit in each other's place, "" if no pair does, or several.

    The operator's own checks decide, on tensors without memory.
    """

    def fits(given: dict[str, Any]) -> bool:
        with suppress(Exception):
            operator.fake(operator.args(**{name: _without_memory(value) for name, value in given.items()}))
            return True
        return False

    def remark(args: Sequence[Any], named: dict[str, Any]) -> str:
        given = {**dict(zip(names, args, strict=False)), **named}
        if fits(given):  # what is wrong are values or devices
            return ""
        tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        pairs = [(a, b) for a, b in combinations(tensors, 2) if fits({**given, a: given[b], b: given[a]})]
        return "{} and {} fit in each other's place: exchange them".format(*pairs[0]) if len(pairs) == 1 else ""

    return remark


def _without_memory(value: Any) -> Any:
    """Return a tensor of the same form on the meta device; also for each of a list."""
    if isinstance(value, list | tuple):
        return [_without_memory(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _check_kinds(operator: Operator, names: Sequence[str]) -> Callable[[Sequence[Any], dict[str, Any]], None]:
    """Make the check of a call with positional parameters `names`; see `_refuse_kind`."""
    kinds = {name: _type(hint, name) for name, hint in hints_of(operator.args).items()}

    def check(given: Sequence[Any], named: dict[str, Any]) -> None:
        for name, value in (*zip(names, given, strict=False), *named.items()):
            kind = kinds.get(name, "Tensor").rstrip("?")
            if type(value) in _KEPT or kind in ("Tensor", "str") or (value is None and kinds[name] != kind):
                continue
            _refuse_kind(f"tile.{operator.name}: {name}", kind, value)

    return check


def _refuse_kind(what: str, kind: str, value: Any) -> None:
    """Raise TypeError for a value that torch would take for another one, or refuse with a misleading text."""
    if kind == "bool" and (value is None or (isinstance(value, int | float) and value not in (0, 1))):
        raise TypeError(f"{what} is {value!r}; expected True or False")
    if kind == "Tensor[]" and isinstance(value, torch.Tensor):  # its rows
        raise TypeError(f"{what} is one tensor; expected a list of tensors")
    if kind == "ScalarType" and isinstance(value, str):
        raise TypeError(f"{what} is {value!r}; expected a torch.dtype, as torch.float16")
    if isinstance(value, torch.Tensor) and value.requires_grad:  # its value, without the gradient
        fix = "no gradient reaches it: multiply a tensor by it, or pass its .item()"
        raise TypeError(f"{what} is a tensor that requires a gradient; expected a number: {fix}")


def as_listed(x: Any) -> Any:
    """Return a list for a tuple of tensors, as torch takes only lists in some places."""
    return list(x) if isinstance(x, tuple) else x


def _signature(args: Any, result: Any) -> inspect.Signature:
    """Return the parameters of `args`, with tensors for its generic type."""
    hints = hints_of(args)
    found = inspect.signature(args)
    parameters = [p.replace(annotation=_of_tensors(hints[p.name])) for p in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=None if result is type(None) else result)


def _of_tensors(hint: Any) -> Any:
    """Replace the generic type of an annotation by `torch.Tensor`."""
    if isinstance(hint, TypeVar):
        return torch.Tensor
    return hint[torch.Tensor] if getattr(hint, "__parameters__", ()) else hint
