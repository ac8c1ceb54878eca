# SPDX-License-Identifier: Apache-2.0
"""What calls launch, found out without tensors: views are followed, what cannot be known is refused with a reason."""

import pytest
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_tile.hardware import LARGEST_SIZE
from torch_tile.inductor.codegen.symbolic_launch import (
    NotEmbedded,
    Symbols,
    TensorMeta,
    record,
)
from torch_tile.kernels.attention.forward import attention
from torch_tile.ops import launchers
from torch_tile.runtime.launch_plan import tensors_in

CPU = torch.device("cpu")


def form(*size, stride=None, **more) -> TensorMeta:
    return TensorMeta(torch.float32, CPU, size, stride or torch.empty(size, device="meta").stride(), **more)


@pytest.fixture
def inductor():
    """An environment with the symbols s (typically 9, at least 2) and t (12, from 2 to 64)."""
    from torch._dynamo.source import ConstantSource
    from torch.utils._sympy.value_ranges import ValueRanges

    env = ShapeEnv()
    found = [
        env.create_symbol(n, ConstantSource(f"n{n}"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        for n in (9, 12)
    ]
    env.var_to_range[found[1]] = ValueRanges(2, 64)
    return env, *found


def softmax(given):
    launchers.softmax(given[0], out=given[1])


def test_views_are_followed():
    (q, kv) = form(2, 4, 24, 16), form(2, 24, 5, 32)

    def run(given):
        k, v = given[1].transpose(1, 2)[:, 1:].split(16, -1)
        attention(given[0], k, v, None, True)

    recorded = record(run, [q, kv], Symbols(None))
    plan = recorded.plan
    (launch,) = plan.launches
    tensors = tensors_in(launch.args)
    places = [(plan.root(x), plan.offset(x)) for x in tensors]
    assert places == [(0, 0), (1, 4 * 32), (1, 4 * (32 + 16)), (3, 0), (2, 0)]
    assert plan.given == 2 and [tuple(x.shape) for x in plan.made] == [(2, 4, 24, 16), (2, 4, 24)]
    assert tensors[1].stride()[-2:] == (160, 1)


def test_a_form_may_be_a_view():
    whole = form(6, 8, view=((6, 4), (8, 1), 4), low=8)
    recorded = record(softmax, [whole, form(6, 4)], Symbols(None))
    plan = recorded.plan
    source = plan.launches[0].args[0]
    assert plan.offset(source) == 16 and plan.address(source) % 16 == 8 and source.stride()[-2] == 8


REFUSED = {
    "a copy": (lambda x, out: launchers.softmax(x.t().contiguous(), out=out), "aten::clone", 0),
    "a value": (lambda x, out: launchers.softmax(x * x.sum(), out=out), "aten::sum", None),
    "a fill": (lambda x, out: (out.zero_(), launchers.softmax(x, out=out)), "aten::zero_", None),
    "nothing": (lambda x, out: None, "nothing is launched", None),
    "an error": (lambda x, out: launchers.softmax(x, 7, out=out[0]), "Error", None),
}


@pytest.mark.parametrize(("run", "why", "copies"), REFUSED.values(), ids=REFUSED)
def test_refusals(run, why, copies):
    with pytest.raises(NotEmbedded, match=why) as refusal:
        record(lambda given: run(*given), [form(6, 6), form(6, 6)], Symbols(None))
    assert refusal.value.copies == copies


def test_sizes_may_be_symbols(inductor):
    env, s, t = inductor
    symbols = Symbols(env)
    recorded = record(softmax, [form(s, t, 32, stride=(32 * t, 32, 1))] * 2, symbols)
    (launch,) = recorded.plan.launches
    theirs = {ours: each for each, ours in symbols.here.items()}
    shown = [n.node.expr.subs(theirs) if isinstance(n, torch.SymInt) else n for n in launch.args[0].shape]
    assert shown == [1, s * t, 32] and symbols.asked() == []
    bounds = {each: symbols.env.var_to_range[ours] for each, ours in symbols.here.items()}
    assert (bounds[s].lower, bounds[s].upper) == (2, LARGEST_SIZE) and (bounds[t].lower, bounds[t].upper) == (2, 64)
    assert env.guards == []  # nothing is asked of Inductor's own


def test_least_and_largest_are_settled_by_bounds(inductor):
    from torch.utils._sympy.functions import Max, Min

    env, s, t = inductor
    settled = Symbols(env).settled
    assert settled(s * Min(256, 256 * s)) == 256 * s and settled(Max(1, s) + Max(t, 64, s - s)) == s + 64
    assert settled(Max(3, s)) == Max(3, s)


def test_what_depends_on_a_symbol_is_refused(inductor):
    env, s, _ = inductor

    def run(given):
        softmax([x[:4] if given[0].shape[0] % 8 == 1 else x for x in given])

    with pytest.raises(NotEmbedded, match=rf"sizes known at run time only.*{s}"):
        record(run, [form(s, 32, stride=(32, 1))] * 2, Symbols(env))
    with pytest.raises(NotEmbedded, match="no size"):
        Symbols(env).number(sympy.Symbol("x", real=True, integer=False))
