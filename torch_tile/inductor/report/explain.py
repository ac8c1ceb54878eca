# SPDX-License-Identifier: Apache-2.0
"""Explain what `backend="tile"` finds in a model, what it replaces, and why not more: `torch_tile.explain`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.spelling import did_you_mean

if TYPE_CHECKING:
    from torch_tile.inductor.report.rows import Report


def explain(
    model: Any,
    *args: Any,
    select: str | None = None,
    options: Mapping[str, Any] | None = None,
    backward: bool = False,
    **kwargs: Any,
) -> Report:
    """Run the passes over `model(*args, **kwargs)` and report every subgraph of a family we know.

    No code is generated, so this takes seconds where compiling takes minutes; `select="fastest"` compiles each
    subgraph both ways and times it, as the backend does by default.

    The model is run, so arguments that it changes (a KV cache) are changed once. Its own compiled code, if any, is
    not touched.

    Args:
        model: a module or function, not yet compiled.
        *args: its arguments.
        select: "tile" (the default) says what fits; "fastest" what is faster on this machine, with both times.
        options: as for `torch.compile(model, backend="tile", options=...)`; `select` may also stand there.
        backward: also compile the backward, of the sum of all floating outputs.
        **kwargs: its keyword arguments.

    Returns:
        A `Report`: its `rows` have what is known of each subgraph as fields, and `replaced()` and `missed()` choose
        among them. `str()` is a table; `save("explain.html")` writes a page with source lines, times and schedules.
    """
    import torch

    from torch_tile.inductor import compat
    from torch_tile.inductor.dry_run import dry_run
    from torch_tile.inductor.report.rows import collect

    if isinstance(model, type):
        raise TypeError(f"explain: model is the class {model.__name__}; expected an instance, {model.__name__}(...)")
    if not callable(model):
        raise TypeError(f"explain: model is {type(model).__name__}; expected an nn.Module or a function")
    _refuse_unknown_keywords(model, kwargs)
    _refuse_missing_inputs(model, args, kwargs)
    chosen = _options(select, options, backward)
    backend = functools.partial(dry_run, options=chosen, watch=True)

    def wrapper(*values: Any, **named: Any) -> Any:
        return model(*values, **named)

    # Dynamo keeps what it compiled with the code object: a new one neither finds the user's compiles nor adds to them.
    fresh = types.FunctionType(wrapper.__code__.replace(), wrapper.__globals__, "model", None, wrapper.__closure__)
    breaks, graphs = compat.graph_breaks(), compat.compiled_graphs()
    with (
        collect() as report,
        compat.no_graph_caches(),
        compat.no_recompile_limit(),
        torch.set_grad_enabled(backward or torch.is_grad_enabled()),
    ):
        try:
            outputs = torch.compile(fresh, backend=backend)(*args, **kwargs)
        except Exception as problem:
            if len(args) == 1 and isinstance(args[0], list | tuple):
                are_sizes = all(isinstance(each, int) for each in args[0])
                fix = f"torch.randn({tuple(args[0])})" if are_sizes else "*inputs"
                problem.add_note(f"explain gave the model one {type(args[0]).__name__}: write explain(model, {fix})")
            raise
        if backward:
            _backward(outputs)
    report.asked, report.of_eval = chosen.get("select", "fastest"), getattr(model, "training", True) is False
    if compat.graph_breaks() > breaks:
        report.graph_breaks = max(1, compat.compiled_graphs() - graphs - 1)
    return report


def _refuse_unknown_keywords(model: Any, named: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that neither `explain` nor the model's forward takes."""
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):  # functions without a signature
        return
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    own = ("select", "options", "backward")
    for name in named:
        if name == "families" and name not in parameters:
            raise TypeError('explain: families is an option: write options={"families": ["norm", "gemm"]}')
        if name not in parameters:
            has = f"explain has {', '.join(own)}; the model has {', '.join(parameters) or 'none'}"
            raise TypeError(
                f"explain: neither it nor the model's forward has a parameter {name!r}"
                f"{did_you_mean(name, (*own, *parameters))}; {has}"
            )


def _refuse_missing_inputs(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise TypeError for inputs that the model's forward cannot be called with."""
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):  # functions without a signature
        return
    try:
        signature.bind(*args, **named)
    except TypeError as problem:
        text = f"explain: the model's forward takes ({', '.join(signature.parameters)}), got {len(args)} inputs"
        raise TypeError(f"{text}: {problem}; give them behind the model, explain(model, *inputs)") from None


def _options(select: str | None, options: Mapping[str, Any] | None, backward: bool) -> dict[str, Any]:
    """Return the backend's options for the arguments of `explain`, checked before the model runs."""
    from torch_tile.inductor.backend import split_options

    if not isinstance(backward, bool):
        raise TypeError(f"explain: backward is {backward!r}; expected True or False")
    if select is not None and not isinstance(select, str):
        raise TypeError(f"explain: select is {type(select).__name__}; expected 'tile' or 'fastest'")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"explain: options is {options!r}; expected a dict, as {{'select': 'tile'}}")
    chosen = {"select": "tile"} if options is None else dict(options)
    if select is not None and options is not None and options.get("select", select) != select:
        raise ValueError(
            f"explain: select is {select!r}, and options has select {options['select']!r}; give one of both"
        )
    chosen |= {} if select is None else {"select": select}
    split_options(None, chosen)
    return chosen


def _backward(outputs: Any) -> None:
    """Run the backward without touching the `grad` of anything."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not tensors:
        raise ValueError(
            "explain(backward=True): no output of the model requires a gradient; give inputs or parameters "
            "that do, or leave backward out"
        )
    loss = torch.stack([t.float().sum() for t in tensors]).sum()
    leaves = _graph_leaves(loss)
    torch.autograd.grad(loss, leaves, allow_unused=True)


def _graph_leaves(loss: Any) -> list[Any]:
    """Return the tensors whose gradients a backward from `loss` would accumulate."""
    found, stack, seen = [], [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        stack.extend(n for n, _ in node.next_functions)
    return found
