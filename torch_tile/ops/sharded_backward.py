# SPDX-License-Identifier: Apache-2.0
"""Gradients of ops on DTensors: the op's backward, on the tensors that this rank has.

The forward's outputs say which dimension was sharded; the op's rule says how inputs, saved tensors and gradients lie
then. So a backward is written once, for plain tensors, and sends nothing but what redistributing its inputs takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_tile.ops.registry import Operator
from torch_tile.ops.saved_args import save_args
from torch_tile.ops.sharding import DTENSOR
from torch_tile.ops.sharding_rule import Dims

Backward = Callable[..., tuple[Any, ...]]


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor. Imports nothing."""
    module = sys.modules.get(DTENSOR)
    return module is not None and isinstance(value, getattr(module, "DTensor", ()))


def sharded(operator: Operator) -> tuple[Callable[..., None], Backward]:
    """Wrap an operator's `setup_context` and `backward`, made for plain tensors, so that they take DTensors as well."""
    backward = operator.backward
    assert backward is not None
    setup_context = operator.setup_context or (lambda ctx, args, output: save_args(ctx, args))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        args = operator.args(*inputs)
        setup_context(ctx, args, output)
        first = output[0] if isinstance(output, tuple) else output
        if is_dtensor(first):
            ctx.sharding = _Sharding(operator, args, first)

    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        found: _Sharding | None = getattr(ctx, "sharding", None)
        return backward(ctx, *grads) if found is None else found.run(backward, ctx, grads)

    return setup, run


class _LocalContext:
    """An op's context whose saved tensors are local."""

    def __init__(self, ctx: Any, saved: list[torch.Tensor | None]) -> None:
        self._ctx = ctx
        self.saved_tensors = saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Sharding:
    """The sharding of one call."""

    def __init__(self, operator: Operator, inputs: Any, output: Any) -> None:
        self.rule = operator.sharding(inputs)
        self.mesh = output.device_mesh
        self.names = [self._name(placement) for placement in output.placements]
        """For each dimension of the mesh the name of what is sharded over it, "" for nothing."""
        self.inputs = list(self._inputs(operator.overload, inputs))
        """For each argument the names and sizes of its dimensions, a list of these, or None for no tensor."""

    def _name(self, placement: Any) -> str:
        """Return the name of the dimension that a placement shards; "" for a replicated tensor."""
        if placement.is_partial():
            return self.rule.summed[0]
        return self.rule.outputs[0][placement.dim] if placement.is_shard() else ""

    def _inputs(self, op: torch._ops.OpOverload, inputs: tuple[Any, ...]) -> Iterator[Any]:
        """Yield for each argument the names and sizes of its dimensions."""
        dims = iter(self.rule.inputs)
        for argument, value in zip(op._schema.arguments, inputs, strict=True):
            if isinstance(value, list) and "Tensor" in str(argument.type):
                yield [(next(dims), t.shape) for t in value]
            elif "Tensor" in str(argument.type) and "List" not in str(argument.type):
                here = next(dims)
                yield None if value is None else (here, value.shape)
            else:
                yield None

    def run(self, backward: Backward, ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
        """Compute the gradients of all arguments, from DTensors to DTensors."""
        saved = self.rule.inputs if self.rule.saved is None else self.rule.saved
        here = _LocalContext(ctx, [self._local(t, d) for t, d in zip(ctx.saved_tensors, saved, strict=True)])
        upstream = [self._local(g, d) for g, d in zip(grads, self.rule.outputs, strict=False)]
        results = zip(backward(here, *upstream), self.inputs, strict=True)
        return tuple(
            [self._to_dtensor(v, i) for v, i in zip(value, into, strict=True)]
            if isinstance(into, list)
            else self._to_dtensor(value, into)
            for value, into in results
        )

    def _whole_or_sharded(self, dims: Dims) -> list[Any]:
        """Return the placements of a tensor with these dimensions: sharded where it has the sharded dimension."""
        from torch.distributed.tensor import Replicate, Shard

        return [Shard(dims.index(name)) if name in dims and name else Replicate() for name in self.names]

    def _gradients(self, dims: Dims) -> list[Any]:
        """Return placements of the gradient of a tensor with these dimensions.

        If ranks used the whole tensor for different parts of the result, each rank has a part of a sum. If a summed
        dimension is sharded, each rank has the gradient of the whole result. It also has that of the operands added to
        the result.
        """
        from torch.distributed.tensor import Partial

        return [
            Partial() if name and name not in (*dims, *self.rule.summed) else placement
            for name, placement in zip(self.names, self._whole_or_sharded(dims), strict=True)
        ]

    def _local(self, tensor: Any, dims: Dims | None) -> torch.Tensor | None:
        """Return the local part of a DTensor, redistributed as the rule needs it."""
        if dims is None or not is_dtensor(tensor):
            return None
        there = tensor.redistribute(self.mesh, self._whole_or_sharded(dims))
        local: torch.Tensor = there.to_local(grad_placements=self._gradients(dims))
        return local

    def _to_dtensor(self, local: torch.Tensor | None, into: tuple[Dims, torch.Size] | None) -> torch.Tensor | None:
        """Make a DTensor of a local gradient."""
        from torch.distributed.tensor import DTensor

        if local is None or into is None:
            return None
        dims, shape = into
        placements, stride = self._gradients(dims), _contiguous(shape)
        out: torch.Tensor = DTensor.from_local(
            local.contiguous(), self.mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return out


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)
