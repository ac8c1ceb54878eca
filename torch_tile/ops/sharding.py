# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tile` on DTensors: which shardings of its arguments an op computes without looking at other ranks.

The rules are part of the operators' declarations (sharding_rule.py). DTensor redistributes arguments that lie in no
way that a rule allows. The rules are registered when torch.distributed.tensor is imported, before or after torch_tile;
where it is not, they cost nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.ops.registry import OPERATORS, Operator
from torch_tile.ops.sharding_rule import Dims, Rule
from torch_tile.ops.when_imported import when_imported

DTENSOR = "torch.distributed.tensor"


def rule_of(op: torch._ops.OpOverload, args: Sequence[Any]) -> Rule:
    """Return the rule of a call, whose trailing arguments may be left to their defaults."""
    operator = OPERATORS[op._opname]
    return operator.sharding(operator.args(*args))


def placements(rule: Rule, num_outputs: int, mesh: Any) -> list[tuple[list[Any], list[Any]]]:
    """List what a rule allows on one dimension of a mesh: (placements of outputs, placements of tensor arguments)."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    outputs = rule.outputs[:num_outputs]
    inputs = [dims for dims in rule.inputs if dims is not None]

    def shard(name: str, tensors: Sequence[Dims], otherwise: Any) -> list[Any]:
        return [Shard(dims.index(name)) if name in dims else otherwise for dims in tensors]

    free = [name for name in rule.free if name not in rule.even or _falls_evenly(rule.even[name], mesh)]
    allowed: list[tuple[list[Any], list[Any]]] = [([Replicate()] * len(outputs), [Replicate()] * len(inputs))]
    allowed += [(shard(name, outputs, Replicate()), shard(name, inputs, Replicate())) for name in free]
    allowed += [([Partial()] * len(outputs), shard(name, inputs, Partial())) for name in rule.summed]
    return allowed


def _falls_evenly(parts: int, mesh: Any) -> bool:
    """Return whether sharding gives all ranks equal shares, or some rank none, which torch itself refuses."""
    sizes = [mesh.size(i) for i in range(mesh.ndim)]
    ranks = (math.prod(some) for n in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, n))
    return all(parts < each or parts % each == 0 for each in ranks)


def register(operator: Operator) -> None:
    """Tell DTensor the rule of an operator, now or when torch.distributed.tensor is imported."""
    when_imported(DTENSOR, functools.partial(_register, operator))


def _register(operator: Operator) -> None:
    """Register an operator's sharding rule with DTensor."""
    from torch.distributed.tensor.experimental import register_sharding

    op = operator.overload
    register_sharding(op)(functools.partial(_allowed, op))
    _hash_every_argument(op)


def _allowed(op: torch._ops.OpOverload, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    """List the shardings that an operator's rule allows for a call, in DTensor's form."""
    return placements(rule_of(op, args), len(op._schema.returns), args[0].mesh)


def _hash_every_argument(op: torch._ops.OpOverload) -> None:
    """Let DTensor's cache of sharding decisions see every argument.

    `register_sharding` makes the cache look at tensors and at arguments after the first int only. But decisions depend
    on the causal flag and on activations, and dtypes of results depend on other arguments. There is no public way to
    say so. Every version of torch from 2.11 on keeps this table.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(1, needs_pytree=True)
