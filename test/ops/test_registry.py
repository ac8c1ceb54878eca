# SPDX-License-Identifier: Apache-2.0
"""An operator that is declared in this file alone: all that knows the library's operators knows it, too."""

import functools
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import torch_tile  # noqa: F401
from benchmarks import library
from torch_tile.hardware import Target
from torch_tile.inductor.codegen import lowering
from torch_tile.inductor.graph.nodes import arg, bind, named_args
from torch_tile.inductor.select.roofline import cost_of
from torch_tile.kernels.common import Machine
from torch_tile.ops import checks, launchers, matrix_units, sharding
from torch_tile.ops.reference import reference
from torch_tile.ops.registration import SCHEMAS, register
from torch_tile.ops.registry import FORMS, OPERATORS, V, arguments_of, checked, form, op_gradients
from torch_tile.ops.sharding_rule import Rule
from torch_tile.runtime.launch import form_of
from torch_tile.runtime.launch_plan import has_memory, tensors_in

NAME = "scaled_product"


class Args(NamedTuple, Generic[V]):
    """Arguments of the operator, of every kind that schemas have here."""

    a: V
    b: V
    bias: V | None = None
    scale: float = 2.0
    turned: bool = False


def _fake(args: Args[Tensor]) -> Tensor:
    checks.check_floating(NAME, a=args.a, b=args.b, bias=args.bias)
    checks.check_dims(NAME, "a", args.a, 2, "[M, K]")
    checks.check_size(NAME, "b", args.b, 1 if args.turned else 0, args.a.shape[1], "a's last dimension")
    return args.a.new_empty((args.a.shape[0], args.b.shape[0 if args.turned else 1]))


def _reference(args: Args[Tensor]) -> Tensor:
    product = args.a @ (args.b.mT if args.turned else args.b) * args.scale
    return product if args.bias is None else product + args.bias


def _save(ctx: Any, args: Args[Tensor], output: Tensor) -> None:
    ctx.scale, ctx.turned = args.scale, args.turned
    ctx.save_for_backward(args.a, args.b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    of_b = a.mT @ grad * ctx.scale
    of_a = grad @ (b if ctx.turned else b.mT) * ctx.scale
    return op_gradients(Args, a=of_a, b=of_b.mT if ctx.turned else of_b, bias=grad.sum(0))


def _sharding(args: Args[Any]) -> Rule:
    b = ("n", "k") if args.turned else ("k", "n")
    bias = None if args.bias is None else ("n",)
    return Rule(outputs=[("m", "n")], inputs=[("m", "k"), b, bias], free=("m", "n"), saved=[("m", "k"), b])


@functools.cache
def declared():
    """The declaration. Torch takes it once in a process, where a worker may come back to this module."""
    return register(
        name=NAME,
        args=Args,
        form=form(NAME, Args[Tensor], Tensor, "`scale * a @ b + bias`."),
        fake=_fake,
        run=lambda args, out: out.copy_(_reference(args)),
        reference=_reference,
        setup_context=_save,
        backward=_backward,
        sharding=_sharding,
        flops=lambda args: 2 * args.a[0] * args.a[1] * args.b[0 if args.turned else 1],
        lower_precision=("a", "b", "bias"),
    )


@pytest.fixture(scope="module")
def scaled_product():
    """The declaration, withdrawn from the lists of the process when the tests are through."""
    found = declared()
    OPERATORS[NAME], SCHEMAS[NAME], FORMS[NAME] = found, found.schema, found.form
    yield found
    del OPERATORS[NAME], SCHEMAS[NAME], FORMS[NAME]


def samples(dtype: torch.dtype = torch.float32):
    """With defaults, and with all arguments."""
    a, b, turned, bias = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((5, 7), (7, 9), (9, 7), (9,)))
    return [(a, b), (a, turned, bias, 0.5, True)]


def test_schema_and_opcheck(scaled_product):
    want = "tile::scaled_product(Tensor a, Tensor b, Tensor? bias=None, float scale=2., bool turned=False) -> Tensor"
    assert str(scaled_product.overload._schema) == want
    for args in samples():
        torch.library.opcheck(scaled_product.overload, args)


def test_values_launchers_and_gradients(scaled_product):
    for args in samples(torch.float64):
        out = scaled_product.overload(*args)
        torch.testing.assert_close(out, reference(NAME, *args))
        torch.testing.assert_close(scaled_product.form(*args), out)
        into = torch.empty_like(out)
        with torch.no_grad():
            getattr(launchers, NAME)(*args, out=into)
        torch.testing.assert_close(into, out)
        assert torch.autograd.gradcheck(lambda *x, rest=args[3:]: scaled_product.overload(*x, *rest), args[:3])


def test_refusals_and_autocast(scaled_product):
    (a, b), _ = samples()
    with pytest.raises(TypeError, match=r"tile.scaled_product: b is None; expected a tensor"):
        scaled_product.overload(a, None)
    with pytest.raises(TypeError, match="scale is of type Tensor") as caught:  # torch takes it, so the cause is another
        getattr(torch.ops.tile, NAME)(a, b.mT, scale=torch.tensor(2.0))
    assert "b has size 9" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="b has size 9"):
        scaled_product.overload(a, b.mT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scaled_product.overload(a, b).dtype == torch.bfloat16


def test_sharding(scaled_product):
    specs = [SimpleNamespace(shape=s) for s in ((4, 6), (8, 6))]
    rule = sharding.rule_of(scaled_product.overload, [*specs, None, 1.0, True])
    mesh = SimpleNamespace(ndim=1, size=lambda i: 2)
    assert [str(inputs) for _, inputs in sharding.placements(rule, 1, mesh)] == [
        "[Replicate(), Replicate()]", "[Shard(dim=0), Replicate()]", "[Replicate(), Shard(dim=0)]"
    ]  # fmt: skip


def graph_of(scaled_product, *args, **named):
    """A graph that calls the operator, and the node of the call."""
    graph = torch.fx.Graph()
    nodes = []
    for x in args:
        nodes.append(graph.placeholder(f"x{len(nodes)}") if isinstance(x, Tensor) else x)
        if isinstance(x, Tensor):
            nodes[-1].meta["val"] = x
    node = graph.call_function(scaled_product.overload, tuple(nodes), named)
    node.meta["val"] = scaled_product.overload(*args, **named)
    return node


def test_costs(scaled_product):
    a, b, bias = torch.randn(5, 7), torch.randn(9, 7), torch.randn(9)
    with FlopCounterMode(display=False) as counter:
        scaled_product.overload(a, b, bias, 0.5, True)
    cost = cost_of([graph_of(scaled_product, a, b, bias, turned=True)])
    assert counter.get_total_flops() == cost.flops == 2 * 5 * 7 * 9
    assert cost.bytes == 4 * (5 * 7 + 9 * 7 + 9 + 5 * 9)


def test_arguments_of_a_call_are_read_by_name(scaled_product):
    a, b = torch.randn(5, 7), torch.randn(9, 7)
    node = graph_of(scaled_product, a, b, turned=True)
    assert bind(node, Args[Any]) == Args(*node.args, None, 2.0, True)
    assert (arg(node, "turned"), arg(node, "scale"), arg(node, "b")) == (True, 2.0, node.args[1])
    with pytest.raises(LookupError, match="has no argument 'dim'"):
        arg(node, "dim")
    with pytest.raises(TypeError, match="has no arguments of class"):
        bind(node, OPERATORS["softmax"].args)
    plain = torch.fx.Graph().call_function(len, (1,), {"other": 3})
    assert named_args(plain, torch.ops.aten.add.Tensor) == {"self": 1, "other": 3, "alpha": 1}


def test_documentation(scaled_product):
    assert scaled_product.form.__doc__ == "`scale * a @ b + bias`."
    found = inspect.signature(scaled_product.form)
    assert list(found.parameters) == list(Args._fields) and found.return_annotation is Tensor
    assert found.parameters["bias"].annotation == Tensor | None and found.parameters["scale"].default == 2.0


def test_inductor_lowers_it(scaled_product):
    from torch._inductor.lowering import lowerings

    lowering.register.cache_clear()
    lowering.register()
    assert scaled_product.overload in lowerings


def test_declared_twice(scaled_product):
    with pytest.raises(ValueError, match="declared twice"):
        register(**{name: getattr(scaled_product, name) for name in scaled_product.__dataclass_fields__})


class Kinds(NamedTuple, Generic[V]):
    a: Sequence[V]
    b: Sequence[V] | None
    c: torch.dtype
    d: torch.dtype | None
    e: int | torch.SymInt
    f: str = "none"


class Unknown(NamedTuple, Generic[V]):
    a: dict[str, V]


def test_schemas_of_all_kinds():
    want = '(Tensor[] a, Tensor[]? b, ScalarType c, ScalarType? d, SymInt e, str f="none")'
    assert arguments_of(Kinds) == want
    assert str(torch._C.parse_schema(f"x{want} -> Tensor"))
    with pytest.raises(TypeError, match="the argument a is annotated with"):
        arguments_of(Unknown)


class Truths(NamedTuple, Generic[V]):
    a: V
    always: bool
    maybe: bool | None = None


def test_none_is_for_arguments_that_may_be_left_out():
    form = checked(SimpleNamespace(name="truths", args=Truths), lambda a, always, maybe=None: (always, maybe))
    x = torch.ones(2)
    assert form(x, True) == form(x, True, None) == form(x, always=True, maybe=None) == (True, None)
    for wrong in (lambda: form(x, None), lambda: form(x, True, 2), lambda: form(x, maybe=0.5, always=True)):
        with pytest.raises(TypeError, match="expected True or False"):
            wrong()


@pytest.mark.every_sample
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator_is_declared_whole(name):
    operator = OPERATORS[name]
    assert operator.form is None or operator.form.__doc__, "the documented form has no documentation"
    assert operator.form is not None or name == "fused_norm", "only what the backend makes is undocumented"
    assert operator.backward or operator.in_training or name in ("mla_schedule", "group_tokens")


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_call_launches_what_is_planned(name, samples, monkeypatch):
    """In the same order, on tensors of the same form; and to plan it needs no memory and leaves the arguments alone."""
    operator, seen = OPERATORS[name], []
    monkeypatch.setattr(
        matrix_units, "torch_has_matrix_units", lambda: False
    )  # torch itself would multiply outside of plans

    def form(x):
        """Tensors of plans are fake."""
        return form_of(x)[1:] if isinstance(x, torch.Tensor) else form_of(x)

    def spy(self, function):
        return lambda *choice: lambda *args: seen.append((function.on("cpu"), choice, [form(x) for x in args]))

    for dtype in (torch.float32, torch.bfloat16):
        for given in samples(name, 5, dtype):
            args = operator.args(*given)
            before = [x.clone() for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
            plan = operator.plan(args)
            torch.testing.assert_close([x for x in tree_leaves(given) if isinstance(x, torch.Tensor)], before)
            assert not any(has_memory(x) for x in plan.roots)
            seen.clear()
            with monkeypatch.context() as patch:
                patch.setattr(Machine, "kernel", spy)
                operator.run(args, operator.fake(args))
            planned = [(x.function, x.choice, [form(arg) for arg in x.args]) for x in plan.launches]
            assert planned == seen
            assert all(plan.root(x) is not None for launch in plan.launches for x in tensors_in(launch.args))


def test_plans_know_where_tensors_begin(samples):
    """Of a tensor whose address is no multiple of 16 bytes, kernels load element by element."""
    operator = OPERATORS["rms_norm"]
    whole, machine = torch.randn(8 * 64 + 1, dtype=torch.bfloat16), library.machine_for(Target("cuda", 90))
    aligned, shifted = (operator.plan(operator.args(whole[n:][: 8 * 64].view(8, 64)), machine) for n in (0, 1))
    assert aligned.launches[0].choice != shifted.launches[0].choice
    assert shifted.address(shifted.launches[0].args[0]) % 16 == (whole.data_ptr() + 2) % 16
