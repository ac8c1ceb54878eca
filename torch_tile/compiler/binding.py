# SPDX-License-Identifier: Apache-2.0
"""Bind a caller's arguments to a program's parameters: check each argument and compute the run-time sizes.

The launchers of all targets and the interpreter use these rules. A dimension is computed from any size or stride in
which it is the only unknown and appears linearly. Each unfit argument raises a LaunchError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Binary, Cast, Const, Expr, Scalar, Var
from torch_tile.ir.idmap import mentions
from torch_tile.ir.node import find, walk
from torch_tile.ir.stmt import Program, dimensions

if TYPE_CHECKING:
    import torch

Sizes = dict[Var, int]


@dataclass(frozen=True)
class Fact:
    """One size or stride of a tensor, with the expression that it must equal."""

    name: str
    dim: int
    is_stride: bool
    wanted: Expr
    actual: int
    is_idle: bool = False  # a stride of at most one element: it may name a size, but contradicts no fact or multiple


class Binding:
    """The parameters of `program` that a caller passes: all but those at the positions `allocated`."""

    def __init__(self, program: Program, allocated: Collection[int] = ()):
        self.program = program
        self.given: list[Buffer | Var] = [p for i, p in enumerate(program.params) if i not in allocated]
        self.names: list[str] = [p.name for p in self.given]
        self.sizes: list[Var] = dimensions(program)
        self.has_pointers: bool = any(isinstance(p, Buffer) and p.origin == "pointer" for p in self.given)
        # Whether the check of a call asks for its scalars, too.
        self.asks_scalars: bool = self.has_pointers or any(
            mentions(c, p) for c in program.assumed for p in program.params
        )

    def in_order(self, args: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        """Return the arguments in the order of the parameters; `args` may map names to arguments."""
        if isinstance(args, Mapping):
            if set(args) != set(self.names):
                raise LaunchError(f"{self.program.name} takes the arguments {self.names}, got {sorted(args)}")
            return [args[name] for name in self.names]
        if len(args) != len(self.given):
            made = [p.name for p in self.program.params if p.name not in self.names]
            by_kernel = f"; the kernel allocates {', '.join(made)} itself (out_idx)" if made else ""
            if not made and 0 < len(args) < len(self.given):
                last = list(range(len(args), len(self.given)))
                by_kernel = f"; if it writes {', '.join(self.names[len(args) :])}, let it allocate that: out_idx={last}"
            if len(args) > len(self.program.params):
                by_kernel = "; a compiled kernel takes tensors and scalars, not what it was compiled for"
            raise LaunchError(f"{self._takes()}, got {len(args)}{by_kernel}")
        return list(args)

    def refuse_names(self, named: Collection[str]) -> None:
        """Raise LaunchError for arguments by name, which a compiled kernel does not take."""
        raise LaunchError(f"{self._takes()}, all by position, got {', '.join(named)} by name")

    def _takes(self) -> str:
        """Say which arguments the program takes."""
        count = len(self.given)
        return f"{self.program.name} takes {count} argument{'s'[: count != 1]} ({', '.join(self.names)})"

    def sizes_of(self, args: Sequence[Any], kind: str = "cpu") -> Sizes:
        """Check the tensors in `args`, which must lie on one device of `kind`, and return the run-time sizes."""
        facts: list[Fact] = []
        first: tuple[str, Any] | None = None
        for param, value in zip(self.given, args, strict=True):
            if isinstance(param, Buffer) and not (value is None and self.is_unused(param)):
                check_tensor(param, value, kind, first)
                first = first or (param.name, value.device)
                facts += facts_of(param, value)
        sizes = solve(facts)
        self._check_pointers(args, sizes)
        for var in self.sizes:
            if var not in sizes and self.is_unused(var):
                sizes[var] = 0  # of a tensor that is None
            if var not in sizes:
                what = f"size `{var.name}` does not follow from the shapes and strides of {self.names}"
                raise LaunchError(f"{what}; make it a parameter, `{var.name}: T.int32`")
            if sizes[var] % var.multiple:
                raise LaunchError(
                    f"size `{var.name}`{_place(var, facts)} must be a multiple of {var.multiple}, got {sizes[var]}"
                )
        self._check_assumed(args, sizes)
        return sizes

    def _check_assumed(self, args: Sequence[Any], sizes: Sizes) -> None:
        """Raise LaunchError where a condition of T.assume does not hold."""
        values: dict[Var, Scalar] = {**sizes, **(self.scalars_of(args) if self.asks_scalars else {})}
        for condition in self.program.assumed:
            if not evaluate(condition, values):
                known = ", ".join(f"{v.name} = {values[v]}" for v in dict.fromkeys(find(condition, Var)))
                raise LaunchError(
                    f"{self.program.name} was given sizes against its T.assume. Assume: {condition!r}, got {known}"
                )

    def _check_pointers(self, args: Sequence[Any], sizes: Sizes) -> None:
        """Raise LaunchError for a tensor smaller than the kernel's declared shape behind a pointer."""
        if not self.has_pointers:
            return
        values: dict[Var, Scalar] = {**sizes, **self.scalars_of(args)}
        for param, value in zip(self.given, args, strict=True):
            if isinstance(param, Buffer) and param.origin == "pointer" and value is not None:
                shape, steps = _form(param, values)
                reach = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if 0 not in shape else 0
                if reach > value.numel():
                    raise LaunchError(f"argument `{param.name}` must have {reach} elements, got {value.numel()}")

    def is_unused(self, symbol: Buffer | Var) -> bool:
        """Return whether a parameter or size appears in the signature only; its tensor may then be None."""
        others = (*self.program.workspaces, *self.program.outputs) if isinstance(symbol, Var) else ()
        made = any(mentions(size, symbol) for b in others for size in (*b.shape, *(b.strides or ())))
        viewed = any(view.base is symbol for view in self.program.views)
        return not made and not viewed and not any(mentions(kernel, symbol) for kernel in self.program.kernels)

    def scalars_of(self, args: Sequence[Any]) -> dict[Var, Scalar]:
        """Return the numbers in `args` as Python numbers, each inside the range of its type."""
        return {p: scalar(p, a) for p, a in zip(self.given, args, strict=True) if isinstance(p, Var)}


def not_a_tensor(name: str, value: object) -> str:
    """Return the message for an argument that should be a tensor, with what makes one of it."""
    kind = type(value)
    text = f"argument `{name}` must be a tensor, got {'a numpy.' * (kind.__module__ == 'numpy')}{kind.__name__}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"{text}: give torch.from_numpy({name}), which shares its memory"
    if kind in (list, tuple, int, float):
        return f"{text}: give torch.tensor({name}) of the kernel's dtype"
    if hasattr(value, "weight"):
        return f"{text}: give {name}.weight.detach()"
    return text


def check_tensor(param: Buffer, value: Any, kind: str, first: tuple[str, torch.device] | None) -> None:
    """Raise unless `value` is a tensor of the parameter's dtype and rank on `first`'s device (name, device)."""
    import torch

    name = param.name
    if isinstance(value, int) and not isinstance(value, bool) and param.origin == "pointer":
        what = f"argument `{name}` is an address, and launches check the size and device of what is there"
        raise LaunchError(f"{what}: give the tensor, not its data_ptr(); a table T.Tensor((n,), T.ptr) holds addresses")
    if not isinstance(value, torch.Tensor):
        raise LaunchError(not_a_tensor(name, value))
    wanted = {param.torch_dtype(), *((torch.uint8, torch.int8) if param.seen_as and param.dtype.bits == 8 else ())}
    if value.dtype not in wanted:
        wants, fix = param.torch_dtype(), f"give {name}.to({param.torch_dtype()}), or declare `{name}` with its dtype"
        raise LaunchError(f"argument `{name}` must have dtype {wants}, got {value.dtype}: {fix}")
    if value.dim() != param.rank and param.origin != "pointer":
        raise LaunchError(f"argument `{name}` must have {param.rank} dimensions, got shape {list(value.shape)}")
    if value.device.type != kind:
        what = "a CUDA device" if kind == "cuda" else kind
        raise LaunchError(f"argument `{name}` must be on {what}, got a tensor on {value.device}")
    if first is not None and value.device != first[1] and kind != "cpu":
        raise LaunchError(
            f"argument `{name}` must be on {first[1]}, as `{first[0]}` is, got a tensor on {value.device}"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise LaunchError(
            f"argument `{name}` is a tensor of torch.func.vmap or a transform like it, which has no memory of its own; "
            "give the kernel a dimension for the batch, or call it outside of the transform"
        )
    if value.layout is not torch.strided or value.is_neg():
        raise LaunchError(f"argument `{name}` must be a plain dense tensor; pass .to_dense() or .resolve_neg()")
    if (param.strides is None or param.origin == "pointer") and not value.is_contiguous():
        raise LaunchError(
            f"argument `{name}` must be contiguous, got strides {value.stride()} for shape {list(value.shape)}; "
            "pass .contiguous(), or annotate it with T.StridedTensor"
        )


def held(param: Buffer, value: Any, values: Mapping[Var, Scalar]) -> Any:
    """Return a tensor as kernels see it, with the sizes and scalars `values`.

    Narrow types become bytes, None becomes an empty tensor, and a pointer becomes a view of the declared shape.
    """
    import torch

    if value is None:
        return torch.empty([0] * param.rank, dtype=param.dtype.as_torch())
    value = value.detach()
    if param.origin == "pointer":
        value = value.as_strided(*_form(param, values))
    return value.view(param.dtype.as_torch()) if param.seen_as and value.dtype != param.dtype.as_torch() else value


def _form(param: Buffer, values: Mapping[Var, Scalar]) -> tuple[list[int], list[int]]:
    """Return the sizes and strides of the tensor declared behind a pointer."""
    shape = [size_of(n, values, param.name) for n in param.shape]
    if param.strides is not None:
        return shape, [size_of(n, values, param.name) for n in param.strides]
    return shape, [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def facts_of(param: Buffer, tensor: torch.Tensor) -> list[Fact]:
    """List the sizes and strides of an argument, each with the expression that it must equal."""
    found: list[Fact] = []
    if param.origin == "pointer":
        return found
    for dim, wanted in enumerate(param.shape):
        actual = tensor.shape[dim]
        if param.seen_as and param.seen_as.bits < 8 and dim == param.rank - 1 and isinstance(wanted, Binary):
            wanted, actual = wanted.a, actual * (8 // param.seen_as.bits)  # bytes, of several elements each
        found.append(Fact(param.name, dim, False, wanted, actual))
    is_empty = param.strides is not None and any(size == 0 for size in tensor.shape)
    for dim, wanted in enumerate(param.strides or ()):
        actual = tensor.stride(dim)
        if param.seen_as and param.seen_as.bits < 8 and isinstance(wanted, Binary) and wanted.op == "//":
            wanted, actual = wanted.a, actual * (8 // param.seen_as.bits)
        found.append(Fact(param.name, dim, True, wanted, actual, is_idle=tensor.shape[dim] <= 1 or is_empty))
    return found


def solve(facts: Sequence[Fact]) -> Sizes:
    """Compute the dimensions that the facts determine. Raises LaunchError where facts disagree."""
    sizes: Sizes = {}
    if waiting := learn(facts, sizes)[1]:
        raise unsolved_error(waiting, sizes)
    return sizes


def unsolved_error(waiting: Sequence[Fact], sizes: Sizes) -> LaunchError:
    """Return the error for facts that determine no size; it names the one with the fewest unknown sizes."""
    fact = min(waiting, key=lambda each: len(_unknown(each.wanted, sizes)))
    names = ", ".join(v.name for v in _unknown(fact.wanted, sizes))
    what = "stride" if fact.is_stride else "size"
    return LaunchError(
        f"argument `{fact.name}` has {what} {fact.actual} in dimension {fact.dim}, from which {names} of "
        f"{fact.wanted!r} does not follow"
    )


def learn(facts: Sequence[Fact], sizes: Sizes) -> tuple[list[Fact], list[Fact]]:
    """Add the dimensions that the facts determine to `sizes`.

    Returns the facts that each of them followed from, and the facts that remain open. Raises LaunchError where facts
    disagree.
    """
    sources: list[Fact] = []
    waiting, idle = [f for f in facts if not f.is_idle], [f for f in facts if f.is_idle]
    waiting = _settle(waiting, sizes, sources)
    _settle(idle, sizes, sources, only_learn=True)
    return sources, _settle(waiting, sizes, sources)


def _settle(facts: Sequence[Fact], sizes: Sizes, sources: list[Fact], only_learn: bool = False) -> list[Fact]:
    """Use facts until none determines another size; return the facts that remain open."""
    pending = list(facts)
    while pending:
        rest = []
        for fact in pending:
            known = len(sizes)
            if not _use(fact, sizes, sources, only_learn):
                rest.append(fact)
            elif len(sizes) > known:
                sources.append(fact)
        if len(rest) == len(pending):
            break
        pending = rest
    return pending


def _use(fact: Fact, sizes: Sizes, sources: Sequence[Fact], only_learn: bool) -> bool:
    """Compare a fact without unknowns, or solve one with a single unknown; return False if the fact must wait."""
    wanted, actual = fact.wanted, fact.actual
    if isinstance(wanted, Var) and wanted not in sizes:
        sizes[wanted] = actual - actual % wanted.multiple if fact.is_idle else actual
        return True
    unknown = _unknown(wanted, sizes)
    if unknown:
        solution = _solution(wanted, unknown[0], actual, sizes) if len(unknown) == 1 else None
        if solution is not None:
            sizes[unknown[0]] = solution
        return solution is not None
    number = size_of(wanted, sizes, fact.name)
    if number != actual and not only_learn:
        what = "stride" if fact.is_stride else "size"
        text = "" if isinstance(wanted, Const) else f" ({wanted!r})"
        raise LaunchError(
            f"argument `{fact.name}` must have {what} {number}{text} in dimension {fact.dim}, got {actual}"
            + _learnt_from(wanted, sizes, sources)
        )
    return True


def _learnt_from(wanted: Expr, sizes: Sizes, sources: Sequence[Fact]) -> str:
    """Return which argument gave each size in an expression, to end an error: the mistake may lie there."""
    told = [
        f"{fact.wanted.name} is {sizes[fact.wanted]} by the {'stride' if fact.is_stride else 'size'} of `{fact.name}` "
        f"in dimension {fact.dim}"
        for fact in sources
        if isinstance(fact.wanted, Var) and any(node is fact.wanted for node in walk(wanted))
    ]
    return f"; {', '.join(told)}" if told else ""


def _solution(wanted: Expr, var: Var, actual: int, sizes: Sizes) -> int | None:
    """Solve `wanted` = `actual` for `var`; return None if `wanted` is not linear or has no solution."""
    linear = (Const, Var, Cast)
    if not all(isinstance(n, linear) or (isinstance(n, Binary) and n.op in ("+", "-", "*")) for n in walk(wanted)):
        return None
    at = [size_of(wanted, {**sizes, var: n}, var.name) for n in (0, 1)]
    if at[1] == at[0]:
        return None
    found = (actual - at[0]) // (at[1] - at[0])
    return found if evaluate(wanted, {**sizes, var: found}) == actual else None


def _unknown(expr: Expr, sizes: Sizes) -> list[Var]:
    """Return the variables of an expression that have no value."""
    return list(dict.fromkeys(n for n in walk(expr) if isinstance(n, Var) and n not in sizes))


def _place(var: Var, facts: Sequence[Fact]) -> str:
    """Describe the argument and dimension in which the caller finds a size."""
    for fact in facts:
        if fact.wanted is var:
            what = "stride" if fact.is_stride else "size"
            return f", the {what} of argument `{fact.name}` in dimension {fact.dim},"
    return ""


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors of the same elements have in common: address, dtype, sizes, and strides that count."""
    shape = tuple(tensor.shape)
    strides = tuple(step for step, size in zip(tensor.stride(), shape, strict=True) if size > 1)
    return tensor.data_ptr(), tensor.dtype, shape, strides


def size_of(expr: Expr, values: Mapping[Var, Scalar], name: str) -> int:
    """Evaluate a size expression of `name` with the sizes computed from the arguments."""
    try:
        found = evaluate(expr, values)
        return int(found) if isinstance(found, int | float) else found  # else a symbol
    except (KeyError, ValueError, ArithmeticError):
        raise LaunchError(f"a size of `{name}`, {expr!r}, cannot be found from the arguments") from None


def _as_float(param: Var, value: float) -> float:
    """Return a number as a float. Raises LaunchError for an integer that no float holds."""
    try:
        return float(value)
    except OverflowError:
        why = f"is an integer of {int(value).bit_length()} bits"
        raise LaunchError(f"argument `{param.name}` {why}, which no {param.dtype} holds; pass a float") from None


def scalar(param: Var, value: Any) -> Scalar:
    """Convert a scalar argument to Python's bool, int or float; tensors without dimensions count as numbers."""
    if isinstance(value, bool | int) or (isinstance(value, float) and param.dtype.is_float):
        if param.dtype.is_float:
            return _as_float(param, value)
        bits = param.dtype.bits if param.dtype.kind != "bool" else 1
        low, high = (0, 1 << bits) if param.dtype.kind != "int" else (-(1 << (bits - 1)), 1 << (bits - 1))
        if low <= value < high:
            return int(value)
        raise LaunchError(
            f"argument `{param.name}` = {value} does not fit into {param.dtype}; annotate it with a wider type"
        )
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", 1) == 0:
        return scalar(param, item())
    raise LaunchError(f"argument `{param.name}` must be a number of type {param.dtype}, got {type(value).__name__}")
