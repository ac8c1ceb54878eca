# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tile` on DTensors: which shardings of its arguments an op computes without looking at other ranks.

A rule names the dimensions of every tensor of a call, as einsum does. Sharding a name of which each index is computed
by itself shards every tensor that has it and replicates the others; sharding one that is summed over gives parts of a
sum. DTensor redistributes arguments that lie in no such way. The rules are registered when torch.distributed.tensor is
imported, before or after torch_tile; where it is not, they cost nothing.
"""

from __future__ import annotations

import functools
import importlib.machinery
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from torch_tile.kernels.epilogue.program import parse

DTENSOR = "torch.distributed.tensor"

Dims = tuple[str, ...]
Spec = Any
"""A DTensor, or what stands for it where DTensor asks for shardings: rules read its `shape`."""


@dataclass(frozen=True)
class Rule:
    """The names of all dimensions of a call, "" for one that broadcasts, and what may be sharded.

    inputs: one for each tensor argument in the schema's order, lists laid out flat, None where there is no tensor.
    free: names of which each index is computed by itself. summed: names that are summed over in a call that is linear
    in each operand that has them and adds up the others. even: names that may be sharded only if so many parts fall
    evenly to the ranks. saved: what the op's backward finds in `ctx.saved_tensors`, if that is not the inputs.
    """

    outputs: Sequence[Dims]
    inputs: Sequence[Dims | None]
    free: Dims
    summed: Dims = ()
    even: Mapping[str, int] = field(default_factory=dict)
    saved: Sequence[Dims | None] | None = None


def _rows(x: Spec) -> Dims:
    """Names of all dimensions but the last."""
    return tuple(f"row{i}" for i in range(len(x.shape) - 1))


def _given(tensor: Spec | None, dims: Dims) -> Dims | None:
    return None if tensor is None else dims


def _broadcast(tensor: Spec | None, dims: Dims) -> Dims | None:
    """The last of `dims`, as many as the tensor has, and "" where its size is 1."""
    if tensor is None:
        return None
    last = dims[len(dims) - len(tensor.shape) :]
    return tuple("" if size == 1 else dim for size, dim in zip(tensor.shape, last, strict=True))


def _gemm(
    a: Spec, bs: Sequence[Spec], aux: Sequence[Spec], kinds: str, epilogue: str, dtype: torch.dtype
) -> Rule:  # fmt: skip
    batch = ("batch",) if len(a.shape) == 3 else ()
    return Rule(
        outputs=[(*batch, "m", "n")],
        inputs=[
            (*batch, "m", "k"),
            *(_broadcast(b, (*batch, "k", "n")) for b in bs),
            *_aux(aux, kinds, batch),
        ],
        free=(*batch, "m", "n"),
        summed=("k",) if len(bs) == 1 and epilogue in ("", "ret acc0") else (),
    )


def _aux(aux: Sequence[Spec], kinds: str, batch: Dims) -> list[Dims]:
    """The auxiliary operands of a product."""
    dims: dict[str, Dims] = {"t": (*batch, "m", "n"), "r": ("n",), "c": (*batch, "m", "")}
    return [dims.get(kind, ("",) * len(x.shape)) for x, kind in zip(aux, kinds, strict=True)]


def _grouped_gemm(
    a: Spec, bs: Sequence[Spec], offsets: Spec, aux: Sequence[Spec], kinds: str, epilogue: str, dtype: torch.dtype
) -> Rule:
    # Where groups end counts rows of the whole, and is no term of a sum.
    inputs = [("m", "k"), *[("group", "k", "n")] * len(bs), ("group",), *_aux(aux, kinds, ())]
    return Rule(outputs=[("m", "n")], inputs=inputs, free=("n",))


def _k_grouped_gemm(a: Spec, b: Spec, offsets: Spec, dtype: torch.dtype) -> Rule:
    return Rule(outputs=[("group", "m", "n")], inputs=[("row", "m"), ("row", "n"), ("group",)], free=("m", "n"))


def _dequant_gemm(
    a: Spec,
    bs: Sequence[Spec],
    scales: Sequence[Spec],
    zeros: Sequence[Spec],
    bits: int,
    high_first: bool,
    offset: int,
    aux: Sequence[Spec],
    kinds: str,
    *_: Any,
) -> Rule:
    # Words and groups of columns need not end where a shard of the columns would.
    weights = [*[("n", "word")] * len(bs), *[("n", "group")] * (len(scales) + len(zeros))]
    return Rule(outputs=[("m", "n")], inputs=[("m", "k"), *weights, *_aux(aux, kinds, ())], free=("m", "n"))


def _linear(x: Spec, weight: Spec, bias: Spec | None, residual: Spec | None, activation: str) -> Rule:
    rows = _rows(x)
    saved = [(*rows, "k"), ("n", "k"), _given(bias, ("n",))]
    return Rule(
        outputs=[(*rows, "n")],
        inputs=[*saved, _given(residual, (*rows, "n"))],
        free=(*rows, "n"),
        summed=("k",) if activation == "none" else (),
        saved=saved,
    )


def _swiglu(x: Spec, gate_weight: Spec, up_weight: Spec, activation: str) -> Rule:
    rows = _rows(x)
    return Rule(outputs=[(*rows, "n")], inputs=[(*rows, "k"), ("n", "k"), ("n", "k")], free=(*rows, "n"))


def _attention(
    q: Spec, k: Spec, v: Spec, mask: Spec | None, causal: bool, scale: float | None, window: int, q_offset: int,
    aux: Sequence[Spec] | None = None, score: str = "",
) -> Rule:  # fmt: skip
    one = k.shape[1] == 1  # a single head of keys serves all queries, wherever they are
    kv_heads = "" if one else "head"
    # A shard does not know where in the whole it begins.
    counted = {("batch", "head", "query", "key")[i] for i in parse(score).inputs("i")}
    counted |= {"query"} if causal or window else set()
    outputs = ("batch", "head", "query", "v"), ("batch", "head", "query")
    inputs = (
        ("batch", "head", "query", "d"),
        ("batch", kv_heads, "key", "d"),
        ("batch", kv_heads, "key", "v"),
        *(_broadcast(x, ("batch", "head", "query", "key")) for x in (mask, *(aux or ()))),
    )
    return Rule(
        outputs=outputs,
        inputs=inputs,
        saved=(*inputs, *outputs),
        free=tuple(dim for dim in ("batch", "head", "query") if dim not in counted),
        # Query heads are where their head of keys is only if every rank has as many of those.
        even={} if one else {"head": k.shape[1]},
    )


def _attention_backward(grad: Spec, q: Spec, k: Spec, v: Spec, out: Spec, lse: Spec, *rest: Any) -> Rule:
    forward = _attention(q, k, v, *rest[:5], *rest[6:])
    q_dims, k_dims, v_dims, *operands = forward.inputs
    out_dims, lse_dims = forward.outputs
    # Gradients of keys are summed over queries, and over the heads that share one of keys.
    free = ("batch", "head") if k_dims and "head" in k_dims else ("batch",)
    return Rule(
        outputs=[
            *(dims for dims in (q_dims, k_dims, v_dims) if dims is not None),
            ("", "batch", "head", "query", "key"),
        ],
        inputs=[out_dims, q_dims, k_dims, v_dims, out_dims, lse_dims, *operands],
        free=tuple(dim for dim in free if dim in forward.free),
        even=forward.even,
        saved=[out_dims, q_dims, k_dims, v_dims, *operands],
    )


def _mla_decode(
    q: Spec,
    q_pe: Spec,
    kv: Spec,
    k_pe: Spec,
    block_table: Spec | None,
    seq_lens: Spec | None,
    scale: float | None,
    num_splits: int,
    schedule: Spec | None,
) -> Rule:
    pages = "batch" if block_table is None else "page"
    inputs = [
        ("batch", "query", "head", "c"),
        ("batch", "query", "head", "r"),
        (pages, "key", "c"),
        (pages, "key", "r"),
        _given(block_table, ("batch", "entry")),
        _given(seq_lens, ("batch",)),
    ]
    return Rule(
        outputs=[("batch", "query", "head", "c"), ("batch", "query", "head")],
        inputs=[*inputs, _given(schedule, ("unit", "field"))],
        saved=inputs,
        free=("batch", "head") if schedule is None else ("head",),  # a schedule is one of all sequences
    )


def _mla_schedule(seq_lens: Spec, rows: int, units: int) -> Rule:
    return Rule(outputs=[("unit", "field")], inputs=[("batch",)], free=())


def _rms_norm(x: Spec, weight: Spec | None, *_: Any) -> Rule:
    rows = _rows(x)
    return Rule(outputs=[(*rows, "n")], inputs=[(*rows, "n"), _given(weight, ("n",))], free=rows)


def _add_rms_norm(x: Spec, residual: Spec, weight: Spec | None, *_: Any) -> Rule:
    dims = (*_rows(x), "n")
    weight_dims = _given(weight, ("n",))
    saved = [dims, weight_dims]  # the sum is saved, not its terms
    return Rule(outputs=[dims, dims], inputs=[dims, dims, weight_dims], free=dims[:-1], saved=saved)


def _layer_norm(x: Spec, weight: Spec | None, bias: Spec | None, eps: float) -> Rule:
    rows = _rows(x)
    inputs = [(*rows, "n"), _given(weight, ("n",)), _given(bias, ("n",))]
    return Rule(outputs=[(*rows, "n")], inputs=inputs, free=rows, saved=inputs[:2])


def _fused_norm(
    x: Spec,
    aux: Sequence[Spec],
    kinds: str,
    prologue: str,
    epilogue: str,
    centred: bool,
    eps: float,
    keep: bool,
    *_: Any,
) -> Rule:
    dims = (*_rows(x), "n")
    by_kind: dict[str, Dims] = {"t": dims, "r": ("n",), "c": (*dims[:-1], "")}
    operands = [
        by_kind.get(k) or (_broadcast(v, dims) if k == "g" else ("",) * len(v.shape))
        for v, k in zip(aux, kinds, strict=True)
    ]
    return Rule(outputs=[dims, dims if keep else ("",)], inputs=[dims, *operands], free=dims[:-1])


def _softmax(x: Spec, dim: int, dtype: torch.dtype | None) -> Rule:
    dims = tuple(f"row{i}" for i in range(len(x.shape)))
    whole = dims[dim] if dims else ""
    return Rule(outputs=[dims], inputs=[dims], free=tuple(d for d in dims if d != whole))


RULES: dict[str, Callable[..., Rule]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "k_grouped_gemm": _k_grouped_gemm,
    "dequant_gemm": _dequant_gemm,
    "linear": _linear,
    "swiglu": _swiglu,
    "attention": _attention,
    "attention_lse": _attention,
    "attention_backward": _attention_backward,
    "mla_decode": _mla_decode,
    "mla_decode_lse": _mla_decode,
    "mla_schedule": _mla_schedule,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "fused_norm": _fused_norm,
    "softmax": _softmax,
}


def rule_of(op: torch._ops.OpOverload, args: Sequence[Any]) -> Rule:
    """The rule of a call, whose trailing arguments may be left to their defaults."""
    defaults = [a.default_value for a in op._schema.arguments[len(args) :]]
    return RULES[op._schema.name.removeprefix("tile::")](*args, *defaults)


def placements(rule: Rule, num_outputs: int, mesh: Any) -> list[tuple[list[Any], list[Any]]]:
    """What a rule allows on one dimension of a mesh: (placements of outputs, placements of tensor arguments)."""
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
    """Does every way to shard so many parts over dimensions of the mesh give all ranks as many, or some rank none?

    The latter torch itself refuses.
    """
    sizes = [mesh.size(i) for i in range(mesh.ndim)]
    ranks = (math.prod(some) for n in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, n))
    return all(parts < each or parts % each == 0 for each in ranks)


@functools.cache
def register() -> None:
    """Tell DTensor the rules, once per process; imports torch.distributed.tensor."""
    from torch.distributed.tensor.experimental import register_sharding

    for name in RULES:
        op = getattr(torch.ops.tile, name).default
        register_sharding(op)(functools.partial(_allowed, op))
        _hash_every_argument(op)


def _allowed(op: torch._ops.OpOverload, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    return placements(rule_of(op, args), len(op._schema.returns), args[0].mesh)


def _hash_every_argument(op: torch._ops.OpOverload) -> None:
    """Let DTensor's cache of sharding decisions see every argument.

    `register_sharding` has it look at tensors and at what follows the first int, but decisions depend on the causal
    flag and on activations, and dtypes of results on other arguments. There is no public way to say so; every version
    of torch from 2.11 on keeps this table.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(1, needs_pytree=True)


class _WhenImported:
    """A finder in `sys.meta_path` that finds nothing but notices the first import of torch.distributed.tensor."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that registers the rules when it is done."""
        if name != DTENSOR:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                sys.meta_path.remove(self)
                register()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Register the rules now if torch.distributed.tensor is imported, else as soon as it is."""
    if DTENSOR in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _WhenImported())
