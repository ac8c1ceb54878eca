# SPDX-License-Identifier: Apache-2.0
"""Make users' kernels operators of PyTorch, so that `torch.compile` takes them into its graphs.

Each compiled kernel becomes an operator of the namespace `torch_tile_kernels` when a graph first calls it. Its schema
tells which arguments the kernel writes. Its fake kernel gives the shapes of the results. `torch_tile.custom_op` adds a
gradient.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch_tile.compiler.binding import scalar, size_of
from torch_tile.diagnostics.arguments import calls_back, can_take, names_parameters
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Program
from torch_tile.tolerance import tolerant

if TYPE_CHECKING:
    from torch_tile.kernel import JITKernel

NAMESPACE = "torch_tile_kernels"
_made: list[Any] = []  # libraries, which live as long as their operators


class Kept:
    """The objects that graphs refer to by name: kernels and operators made while a graph was traced."""


kept: Kept = Kept()
_numbers = itertools.count()
_registered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_kernels: dict[str, JITKernel | None] = {}  # by the names of their operators; None for other arguments


@names_parameters
def custom_op(
    kernel: JITKernel,
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> Callable[..., Any]:
    """Return a kernel's operator, which takes the same arguments; `backward` gives it a gradient.

    `backward(ctx, *grads)` gives one gradient, or None, for each argument. `setup_context(ctx, inputs, output)` keeps
    what it needs; by default, `ctx.saved_tensors` holds the tensors among the inputs, then the outputs. Without
    `backward`, arguments that require gradients are refused.

    Raises:
        TypeError: what is no compiled kernel, and a `backward` that is no function.
        LaunchError: a kernel with a gradient that writes one of its arguments, or returns nothing.
    """
    launcher = getattr(kernel, "launcher", None)
    if launcher is None:
        fix = "give one that torch_tile.compile, or f.compile(...) of a jitted function, returns"
        raise TypeError(f"custom_op: kernel is {type(kernel).__name__}; expected a compiled kernel: {fix}")
    if setup_context is not None and backward is None:
        raise TypeError("custom_op: setup_context is given without the backward for which it would keep tensors")
    results = len(kernel.out_idx) + len(kernel.program.outputs)
    wanted = {
        "backward": (backward, 1 + results, "ctx, *grads"),
        "setup_context": (setup_context, 3, "ctx, inputs, output"),
    }
    for name, (function, count, parameters) in wanted.items():
        if function is not None and results and not can_take(function, count):
            raise TypeError(f"custom_op: {name} cannot be called with {count} arguments; expected {name}({parameters})")
    return _define(kernel, backward, setup_context)


def register_for_dynamo(value: object) -> str:
    """Register a kernel or a kernel function under a new key, and return the key; it is valid while the object lives.

    Dynamo of torch 2.11 passes texts, but no objects, to functions marked by `assume_constant_result`.
    """
    key = f"{type(value).__name__}_{next(_numbers)}"
    _registered[key] = value
    return key


def from_dynamo_key(key: str) -> Any:
    """Return the kernel or kernel function that `register_for_dynamo` gave this key."""
    return _registered[key]


def assume_constant_result(function: Callable[..., str]) -> Callable[..., str]:
    """Let Dynamo call a function while it traces a graph, and take the result for a constant.

    It does what torch.compiler.assume_constant_result does, without importing torch. The functions return names,
    because Dynamo can guard names.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keep(value: Any) -> str:
    """Keep a kernel or operator, and return its name in `kept`."""
    for name, other in vars(kept).items():
        if other is value:
            return name
    name = f"number_{len(vars(kept))}"
    setattr(kept, name, value)
    return name


def same_as(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the position at which each argument is first given; Dynamo traces this function."""
    found: list[int] = []
    for n, value in enumerate(args):
        first = n
        for m in found:
            if first == n and args[m] is value and hasattr(value, "data_ptr"):
                first = m
        found.append(first)
    return tuple(found)


@assume_constant_result
def keep_operator(key: str, same: tuple[int, ...] = ()) -> str:
    """Keep the operator, without a gradient, of the kernel with this Dynamo key; return its name in `kept`.

    `same` is what `same_as` says of the arguments. What is kept takes all arguments. The operator takes a tensor once,
    if it is given for a written parameter and others. So no pass of torch copies it for one of them. The operator is
    defined at the first call.
    """
    kernel = from_dynamo_key(key)
    with _lock:
        made = kernel.__dict__.setdefault("operators", {})
        places = _places(kernel, same)
        if places not in made:
            made[places] = _define(kernel, None, None, places)
        return keep(made[places])


def _places(kernel: JITKernel, same: Sequence[int]) -> tuple[int, ...]:
    """Return for each argument of a kernel the first of the same tensor, if any of these is written."""
    shared = {same[n] for n in _changed(kernel) if n < len(same)}
    count = len(kernel.launcher.binding.given)
    return tuple(same[n] if n < len(same) and same[n] in shared else n for n in range(count))


def _changed(kernel: JITKernel) -> list[int]:
    """Return the positions of the arguments that a call writes."""
    written = [kernel.program.params[n] for n in written_params(kernel.lowered)]
    return [n for n, param in enumerate(kernel.launcher.binding.given) if any(param is w for w in written)]


def results_of(made: Any) -> Any:
    """Return the results of an operator as a call of its kernel does: several as a list."""
    return list(made) if isinstance(made, tuple) else made


def written_params(program: Program) -> set[int]:
    """Return the positions of the tensor parameters that a lowered program's kernels may write."""
    from torch_tile.codegen.tensors import written_buffers  # not before: kernels found on disk need no generator

    found = written_buffers([node for kernel in program.kernels for node in walk(kernel.body)])
    return {n for n, param in enumerate(program.params) if param in found}


def kernel_of(operator: str) -> JITKernel | None:
    """Return the kernel of the operator of this name, as `torch_tile_kernels::scale_1f0c`; None if no kernel has it."""
    return _kernels.get(operator)


def _define(
    kernel: JITKernel, backward: Any, setup_context: Any, places: tuple[int, ...] | None = None
) -> Callable[..., Any]:
    """Register a kernel as an operator of torch, with its schema, fake kernel and gradient; return a way to call it.

    `places` has, for each argument of the kernel, the position of the one that is given for it: by default its own.
    """
    import torch

    from torch_tile.torch_transforms import autograd_kernel, entry_by_entry, refuse_tangents

    given, written = kernel.launcher.binding.given, _changed(kernel)
    own = tuple(range(len(given)))
    places = own if places is None else places
    firsts = sorted(set(places))
    changed = [n for n, first in enumerate(firsts) if any(places[w] == first for w in written)]
    returned = [kernel.program.params[n] for n in kernel.out_idx] + list(kernel.program.outputs)
    if backward is not None and (changed or not returned):
        what = f"writes `{given[written[0]].name}`" if changed else "returns nothing"
        raise LaunchError(
            f"{kernel.__name__} {what}: a kernel with a gradient returns fresh tensors; name them by out_idx"
        )
    name = _name_of(kernel, "" if places == own else "_" + "_".join(map(str, places)))
    parts = [_schema_of(given[first], n in changed) for n, first in enumerate(firsts)]
    results = "Tensor" if len(returned) == 1 else f"({', '.join(['Tensor'] * len(returned))})"
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _made.append(library)
    library.define(f"{name}({', '.join(parts)}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
    spread = [firsts.index(place) for place in places]  # for each argument of the kernel, one of the operator

    def run(*args: Any) -> Any:
        made = kernel.run(*[args[n] for n in spread])
        return made if returned else None

    def fake(*args: Any) -> Any:
        return fake_results(kernel, returned, [args[n] for n in spread])

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    _kernels[operator.name()] = kernel if places == own else None
    alone = functools.partial(_without_gradient, kernel, operator, spread)
    counted = functools.partial(_counted, kernel, backward)
    made = autograd_kernel(operator, lambda: (setup_context or _save_all, counted))

    def autograd(keys: Any, *args: Any) -> Any:
        refuse_tangents(kernel.__name__, args)
        return (alone if backward is None else made)(keys, *args)

    library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_vmap(operator, functools.partial(entry_by_entry, operator, changed), lib=library)
    if places == own:
        return operator  # type: ignore[no-any-return]
    return lambda *args: operator(*[args[first] for first in firsts])


def _counted(kernel: JITKernel, backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    """Return what `backward` gives. Raise TypeError unless that is a gradient, or None, for each argument."""
    names = [param.name for param in kernel.launcher.binding.given]
    kept = f"without setup_context, ctx.saved_tensors holds the tensors of {', '.join(names)}, then the results"
    with calls_back(f"custom_op calls backward(ctx, *grads); {kept}"):
        found = backward(ctx, *grads)
    count = len(found) if isinstance(found, tuple | list) else 1
    if count != len(names):
        raise TypeError(
            f"custom_op: the backward of {kernel.__name__} gives {count} for the arguments {', '.join(names)}; "
            "return a gradient, or None, for each"
        )
    for name, each in zip(names, found if isinstance(found, tuple | list) else (found,), strict=True):
        if each is not None and not hasattr(each, "data_ptr"):
            kind = f"{type(each).__name__} for {name}; expected a tensor, or None"
            raise TypeError(f"custom_op: the backward of {kernel.__name__} gives {kind}")
    return found


def _name_of(kernel: JITKernel, ending: str = "") -> str:
    """Return a name for the operator of a kernel: the kernel's own, and a digest of its text.

    So graphs and contests that are kept on disk mean the same kernel in each process. The digest also covers options
    and returned arguments, which the text does not show. A kernel that has several operators, with gradients of their
    own, gets a number besides.
    """
    options = kernel.build.options, *kernel.out_idx
    digest = hashlib.sha256(f"{kernel.target} {options!r} {kernel.source}".encode()).hexdigest()[:12]
    name = f"{re.sub(r'[^A-Za-z0-9_]', '_', kernel.__name__)}_{digest}{ending}"
    return name if f"{NAMESPACE}::{name}" not in _kernels else f"{name}_{len(_made)}"


def _schema_of(param: Buffer | Var, changed: bool) -> str:
    """Format a parameter for an operator's schema; replace letters of its name that schemas forbid."""
    name = "arg_" + re.sub(r"[^A-Za-z0-9_]", "_", param.name)
    if isinstance(param, Buffer):
        return f"Tensor(a_{name}!) {name}" if changed else f"Tensor {name}"
    return f"{'float' if param.dtype.is_float else 'bool' if param.dtype.kind == 'bool' else 'SymInt'} {name}"


def fake_results(kernel: JITKernel, returned: Sequence[Any], args: Sequence[Any]) -> Any:
    """Return the results of a kernel for tensors without data; check arguments as a call does."""
    import torch

    binding = kernel.launcher.binding
    values: dict[Var, Any] = dict(binding.sizes_of(args, kernel.target.kind))
    values |= {
        p: a if isinstance(a, torch.SymInt) else scalar(p, a)
        for p, a in zip(binding.given, args, strict=True)
        if isinstance(p, Var)
    }
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device(kernel.target.kind))
    made = [
        torch.empty([size_of(s, values, b.name) for s in b.shape], dtype=b.torch_dtype(), device=device)
        for b in returned
    ]
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def is_transformed(torch: Any) -> bool:
    """Return whether tensors may stand for others: in torch.func, forward mode, and dispatch modes."""
    core = torch._C
    return bool(
        core._are_functorch_transforms_active()
        or core._len_torch_dispatch_stack()
        or torch.autograd.forward_ad._current_level >= 0
    )


def lacking_gradient(kernel: JITKernel, args: Sequence[Any]) -> str:
    """Say which argument autograd would record, as a kernel alone has no gradient; "" for none.

    Raises LaunchError for an argument that the kernel writes, unless files of TileLang's are served (tolerance.py).
    Calls below autograd, as those of operators and of torch.autograd.Function, have a gradient from elsewhere.
    """
    wanted = [n for n, value in enumerate(args) if getattr(value, "requires_grad", False)]
    if not wanted:  # what follows would cost each call 2 us
        return ""
    import torch

    given = kernel.launcher.binding.given
    below = torch._C.DispatchKey.AutogradFunctionality
    if wanted[0] >= len(given) or torch._C._dispatch_tls_is_dispatch_key_excluded(below):
        return ""
    rest, params = "pass .detach(), or call it under torch.no_grad()", [given[n] for n in wanted if n < len(given)]
    for written in (kernel.program.params[n] for n in written_params(kernel.lowered)):
        if any(param is written for param in params):
            text = f"argument `{written.name}` of {kernel.__name__} requires gradients, and the kernel writes it, "
            text += f"which autograd cannot see: {rest}"
            if not tolerant():
                raise LaunchError(text)
            return text
    name = f"argument `{params[0].name}` of {kernel.__name__}"
    fix = f"give it one by torch_tile.custom_op(kernel, backward=...), {rest}"
    return f"{name} requires gradients, and the kernel has none: {fix}"


def with_delayed_error(results: Any, args: Sequence[Any], text: str) -> Any:
    """Return what a kernel gave, so that a gradient for `args` is an error with this text. Warn if it gave nothing."""
    import torch

    if results is None:
        warnings.warn(text, stacklevel=3)
        return None
    several = isinstance(results, list)
    outs = results if several else [results]
    wanted = [x for x in args if getattr(x, "requires_grad", False)]
    floating = [x.detach() for x in outs if x.is_floating_point()]
    delayed = torch._C._functions.DelayedError(text, len(wanted) + len(floating))(*wanted, *floating)
    found = iter(delayed[len(wanted) :])
    made = [next(found) if x.is_floating_point() else x for x in outs]
    return made if several else made[0]


def _without_gradient(kernel: JITKernel, operator: Any, spread: Sequence[int], keys: Any, *args: Any) -> Any:
    """Run below autograd; refuse calls that would silently lack a gradient."""
    import torch

    if torch.is_grad_enabled() and (text := lacking_gradient(kernel, [args[n] for n in spread])):
        raise LaunchError(text)
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all inputs and outputs for the gradient."""
    import torch

    outputs = output if isinstance(output, tuple) else (output,)
    ctx.save_for_backward(*(x for x in (*inputs, *outputs) if isinstance(x, torch.Tensor)))
