# SPDX-License-Identifier: Apache-2.0
"""A caller's CPU tensors and numbers as the interpreter holds them, by the rules of torch_tile/compiler/binding.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_tile.compiler.binding import Binding
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.stmt import Program
from torch_tile.simulator.values import Value, constant


def bind(program: Program, args: Sequence[Any] | Mapping[str, Any]) -> tuple[dict[int, torch.Tensor], dict[int, Value]]:
    """Tensors by `id(buffer)`, and the values of scalar parameters and dimensions by `id(var)`.

    Raises LaunchError, naming the argument, for a wrong count, kind, dtype, rank, device, size or stride.
    """
    binding = Binding(program)
    given = binding.in_order(args)
    values: dict[int, Value] = {id(v): n for v, n in binding.sizes_of(given).items()}
    values |= {id(v): constant(n, v.dtype) for v, n in binding.scalars_of(given).items()}
    tensors = {id(p): a.detach() for p, a in zip(program.params, given, strict=True) if isinstance(p, Buffer)}
    return tensors, values
