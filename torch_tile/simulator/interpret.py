# SPDX-License-Identifier: Apache-2.0
"""Run a compiled GPU kernel on a caller's arguments with the thread interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_tile.compiler.binding import Binding, held, place_of, size_of
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc, Program
from torch_tile.simulator.findings import Findings
from torch_tile.simulator.memory import poisoned
from torch_tile.simulator.simt import values as of_threads
from torch_tile.simulator.simt.interpreter import run_threads
from torch_tile.simulator.values import Value, constant


def interpret(
    flat: Program,
    program: Program,
    args: Sequence[Any] | Mapping[str, Any],
    allocated: Sequence[int] = (),
    blocks: Iterable[tuple[int, ...]] | None = None,
) -> Findings:
    """Run `flat`, the stage FLAT of `program`, on the arguments of a call. Tensors are written in place.

    `allocated` are the positions of parameters that the caller leaves out. The caller gets these back as `outputs`,
    with the tensors that the program returns. `blocks` chooses blocks, x first. Tensors of a GPU are copied there and
    back. Raises LaunchError for unfit arguments.
    """
    binding = Binding(program, allocated)
    given = binding.in_order(args)
    copies: dict[Any, torch.Tensor] = {}  # one for all tensors of the same elements
    host = [copies.setdefault(place_of(a), a.detach().cpu()) if isinstance(a, torch.Tensor) else a for a in given]
    if any(isinstance(a, torch.Tensor) and a.device.type != "cpu" for a in given) and any(
        n.buffer.scope == "global" for n in find(flat, Alloc)
    ):
        raise LaunchError(f"{program.name} computes addresses, and the interpreter follows those of CPU tensors only")
    sizes, scalars = binding.sizes_of(host), binding.scalars_of(host)
    values: dict[Var, Scalar] = {**sizes, **scalars}
    rest = iter(host)
    tensors: dict[Buffer, torch.Tensor] = {}
    outputs = []
    originals = (*program.params, *program.workspaces, *program.outputs)
    first_output = len(originals) - len(program.outputs)
    for position, (old, new) in enumerate(zip(originals, (*flat.params, *flat.workspaces, *flat.outputs), strict=True)):
        is_given = position < len(program.params) and position not in allocated
        if is_given:
            value = next(rest)
            value = held(old, value, values) if isinstance(old, Buffer) else value
        elif isinstance(old, Buffer):
            value = poisoned([size_of(s, values, old.name) for s in old.shape], old.dtype)
            if position in allocated or position >= first_output:
                outputs.append(value)
        if isinstance(new, Buffer):
            tensors[new] = value
    with np.errstate(over="ignore"):  # a float beyond its type becomes infinite
        rounded = {v: of_threads.constant(n, v.dtype) for v, n in scalars.items()}
    findings = run_threads(flat, tensors, {**sizes, **rounded}, blocks)
    findings.outputs = tuple(outputs)
    for old_value, new_value in zip(given, host, strict=True):
        if isinstance(old_value, torch.Tensor) and old_value.device.type != "cpu":
            old_value.copy_(new_value)
    return findings


# A caller's CPU tensors and numbers as the interpreter holds them, by the rules of torch_tile/compiler/binding.py.


def bind(
    program: Program, args: Sequence[Any] | Mapping[str, Any]
) -> tuple[dict[Buffer, torch.Tensor], dict[Var, Value]]:
    """Map buffers to tensors, and scalar parameters and dimensions to values.

    Raises LaunchError, naming the argument, for a wrong count, kind, dtype, rank, device, size or stride.
    """
    binding = Binding(program)
    given = binding.in_order(args)
    sizes, scalars = binding.sizes_of(given), binding.scalars_of(given)
    values: dict[Var, Value] = {**sizes}
    values |= {v: constant(n, v.dtype) for v, n in scalars.items()}
    known: dict[Var, Scalar] = {**sizes, **scalars}
    tensors = {p: held(p, a, known) for p, a in zip(program.params, given, strict=True) if isinstance(p, Buffer)}
    return tensors, values
