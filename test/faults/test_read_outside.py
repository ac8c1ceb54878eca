# SPDX-License-Identifier: Apache-2.0
"""A kernel is compiled for what its function reads from outside: a change between two calls reaches the second."""

import collections
import contextvars
import dataclasses
import functools
import gc
import threading
import types
import weakref

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.language as T


class Config:
    factor = 1.0

    @staticmethod
    def scaled(value):
        return value * NUMBER

    def by_factor(self, value):
        return value * self.factor


class Slots:
    __slots__ = ("factor",)


class Derived(Config):
    def __call__(self, value):
        return value * NUMBER

    def called(self, value):
        return self(value)

    @property
    def number(self):
        return NUMBER


class Equal:
    factor = 1.0

    def __eq__(self, other):
        return type(self) is type(other)


class Dict(dict):
    factor = 1.0

    def scaled(self, value):
        return value * NUMBER


class List(list):
    factor = 1.0


class Set(set):
    factor = 1.0


class Float(float):
    factor = 1.0


class Tuple(tuple):
    factor = 1.0


class Named(collections.namedtuple("Named", ["first"])):  # with attributes beside its fields
    factor = 1.0

    def scaled(self, value):
        return value * NUMBER


@dataclasses.dataclass
class Options:
    first: int = 0

    def __post_init__(self):
        self.factor = 1.0


NUMBER, SIZE = 1.0, 5
BUILT_IN = [Dict(a=1), List([1]), Set([1]), Float(2.0), Tuple([1]), Named(1), Options()]  # with attributes
TABLE, LIST, OBJECT, MODULE = {"a": [1.0]}, [1.0], Config(), Config()
MODULE.inner = Config()
LAYER = torch.nn.LayerNorm(3)
HOLDERS = [  # of an object that changes
    collections.deque([OBJECT]), types.MappingProxyType({0: OBJECT}), np.array([OBJECT]), {0: OBJECT}.values(),
]  # fmt: skip
SLOTS, DERIVED, EQUAL, NAMESPACE = Slots(), Derived(), Equal(), types.SimpleNamespace(inner=Config())
TENSOR = torch.tensor(1.0)
HELD = Config()
REFERENCE, PROXY, METHOD = weakref.ref(HELD), weakref.proxy(HELD), weakref.WeakMethod(HELD.by_factor)
WEAK = weakref.WeakValueDictionary(a=HELD)
LOCAL, CONTEXT = threading.local(), contextvars.ContextVar("CONTEXT", default=1.0)


def helper(value):
    return value * NUMBER


def with_default(value, by=[1.0]):  # noqa: B006
    return value * by[0]


def times(by, value, and_by=(1.0,)):
    return value * by * and_by[0]


PARTIAL = functools.partial(times, 1.0, and_by=LIST)


def of_attribute(name):
    return lambda holder: lambda value: value * getattr(holder, name)


def by_item(holder):
    return lambda value: value * next(iter(holder.values() if hasattr(holder, "keys") else holder)).factor


def by_method(holder):
    return lambda value: holder.scaled(value)


def by_call(function):
    return lambda value: function(value)


def another_reference(factor):
    HELD.another = Config()
    HELD.another.factor = factor
    set_global("REFERENCE", weakref.ref(HELD.another))


by_factor, by_number = of_attribute("factor"), of_attribute("number")


@T.macro
def macro(value):
    return helper(value)


def decorated_by(function):
    @functools.wraps(function)
    def call(value):
        return function(value) * LIST[0]

    return call


decorated = decorated_by(helper)


def set_global(name, value):
    globals()[name] = value


def another_helper(factor):
    set_global("helper", lambda value: value * factor)


# What the kernel computes of an element, and what changes the factor in it.
READS = {
    "number": (lambda v: v * NUMBER, lambda to: set_global("NUMBER", to)),
    "numbers of a dict": (lambda v: v * TABLE["a"][0], lambda to: TABLE["a"].__setitem__(0, to)),
    "a new dict": (lambda v: v * TABLE["a"][0], lambda to: set_global("TABLE", {"a": [to]})),
    "elements of a list": (lambda v: v * LIST[0], lambda to: LIST.__setitem__(0, to)),
    "attributes of an object": (lambda v: v * OBJECT.factor, lambda to: setattr(OBJECT, "factor", to)),
    "attributes of attributes": (
        lambda v: v * MODULE.inner.factor,
        lambda to: setattr(MODULE.inner, "factor", to),
    ),
    "attributes of a class": (lambda v: v * Config.factor, lambda to: setattr(Config, "factor", to)),
    "what a static method reads": (lambda v: Config.scaled(v), lambda to: set_global("NUMBER", to)),
    "an object behind getattr": (lambda v: v * getattr(OBJECT, "factor"), lambda to: setattr(OBJECT, "factor", to)),  # noqa: B009
    "attributes in slots": (by_factor(SLOTS), lambda to: setattr(SLOTS, "factor", to)),
    "attributes of a base class": (by_factor(DERIVED), lambda to: setattr(Config, "factor", to)),
    "attributes of objects that compare": (by_factor(EQUAL), lambda to: setattr(EQUAL, "factor", to)),
    "attributes in a namespace": (
        lambda v: v * NAMESPACE.inner.factor,
        lambda to: setattr(NAMESPACE.inner, "factor", to),
    ),
    "what a property reads": (by_number(DERIVED), lambda to: set_global("NUMBER", to)),
    "what a call of an object reads": (lambda v: DERIVED(v), lambda to: set_global("NUMBER", to)),
    "defaults of a helper": (lambda v: with_default(v), lambda to: with_default.__defaults__[0].__setitem__(0, to)),
    "attributes of a helper": (lambda v: helper(v) * helper.factor, lambda to: setattr(helper, "factor", to)),
    "a copy of a list": (lambda v: v * LIST.copy()[0], lambda to: LIST.__setitem__(0, to)),
    "what a method reads": (lambda v: DERIVED.called(v), lambda to: set_global("NUMBER", to)),
    "a tensor that changes in place": (lambda v: v * float(TENSOR), lambda to: TENSOR.fill_(to)),
    "what a method of a dict reads": (by_method(BUILT_IN[0]), lambda to: set_global("NUMBER", to)),
    "what a method of a named tuple reads": (by_method(BUILT_IN[5]), lambda to: set_global("NUMBER", to)),
    "another function": (lambda v: helper(v), another_helper),
    "what a helper reads": (lambda v: helper(v), lambda to: set_global("NUMBER", to)),
    "what a macro's helper reads": (lambda v: macro(v), lambda to: set_global("NUMBER", to)),
    "what a wrapper reads": (lambda v: decorated(v), lambda to: LIST.__setitem__(0, to)),
    "what a wrapped function reads": (lambda v: decorated(v), lambda to: set_global("NUMBER", to)),
    "attributes of a Tensor": (by_factor(TENSOR), lambda to: setattr(TENSOR, "factor", to)),
    "attributes of a Parameter": (lambda v: v * LAYER.weight.factor, lambda to: setattr(LAYER.weight, "factor", to)),
    "attributes of a partial": (lambda v: PARTIAL(v) * PARTIAL.factor, lambda to: setattr(PARTIAL, "factor", to)),
    "what a partial holds": (lambda v: PARTIAL(v), lambda to: LIST.__setitem__(0, to)),
    "another partial": (lambda v: PARTIAL(v), lambda to: set_global("PARTIAL", functools.partial(times, to))),
    "what a partial's function reads": (by_call(functools.partial(decorated)), lambda to: set_global("NUMBER", to)),
    "an object behind a weak reference": (lambda v: v * REFERENCE().factor, lambda to: setattr(HELD, "factor", to)),
    "another weak reference": (lambda v: v * REFERENCE().factor, another_reference),
    "an object behind a proxy": (by_factor(PROXY), lambda to: setattr(HELD, "factor", to)),
    "the class behind a proxy": (by_factor(weakref.proxy(DERIVED)), lambda to: setattr(Config, "factor", to)),
    "an object behind a weak method": (lambda v: METHOD()(v), lambda to: setattr(HELD, "factor", to)),
    "an object in a weak dict": (by_item(WEAK), lambda to: setattr(HELD, "factor", to)),
    "attributes of a thread": (by_factor(LOCAL), lambda to: setattr(LOCAL, "factor", to)),
    "a context's variable": (lambda v: v * CONTEXT.get(), lambda to: CONTEXT.set(to)),
    "options of a layer": (lambda v: v * LAYER.eps, lambda to: setattr(LAYER, "eps", to)),
    **{
        f"an object in a {type(each).__name__}": (by_item(each), lambda to: setattr(OBJECT, "factor", to))
        for each in HOLDERS
    },
    **{
        f"attributes of a {type(each).__name__}": (by_factor(each), functools.partial(setattr, each, "factor"))
        for each in BUILT_IN
    },
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for name in ("NUMBER", "helper", "PARTIAL", "REFERENCE"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(globals(), "TABLE", {"a": [1.0]})
    monkeypatch.setattr(Config, "factor", 1.0)
    helper.factor = SLOTS.factor = with_default.__defaults__[0][0] = 1.0
    for holder in (OBJECT, MODULE.inner, EQUAL, NAMESPACE.inner, HELD, PARTIAL, TENSOR, LAYER.weight, LOCAL, *BUILT_IN):
        monkeypatch.setattr(holder, "factor", 1.0, raising=False)
    CONTEXT.set(1.0)
    LIST[0] = 1.0
    TENSOR.fill_(1.0)
    monkeypatch.setattr(LAYER, "eps", 1.0)


def eager(of):
    @torch_tile.jit(target="cpu")
    def kernel(x):
        n = T.const("n")
        x: T.Tensor((n,), "float32")
        y = T.empty((n,), "float32")
        with T.Kernel(1) as _:
            for i in T.Parallel(n):
                y[i] = of(x[i])
        return y

    return kernel


def lazy(of):
    @torch_tile.jit(out_idx=[-1], target="cpu")
    def kernel(n):
        @T.prim_func
        def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                for i in T.Parallel(n):
                    y[i] = of(x[i])

        return main

    return lambda x: kernel(x.shape[0])(x)


def given(of):
    @torch_tile.jit(out_idx=[-1], target="cpu")
    def kernel(n, compute):
        @T.prim_func
        def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                for i in T.Parallel(n):
                    y[i] = compute(x[i])

        return main

    return lambda x: kernel(x.shape[0], functools.partial(of))(x)


@pytest.mark.parametrize("read", READS)
def test_a_change_between_two_calls(read):
    of, change = READS[read]
    x = torch.randn(5)
    for kernel in (eager(of), lazy(of), given(of)):
        for factor in (2.0, -0.5, 2.0):
            change(factor)
            assert torch.equal(kernel(x), x * factor)
        change(1.0)


@pytest.mark.parametrize("form", [eager, lazy, given])
def test_a_variable_of_a_context_that_is_set_to_none(form):
    unset, x = contextvars.ContextVar("unset", default=2.0), torch.randn(5)
    kernel = form(lambda v: v if unset.get() is None else v * unset.get())
    assert torch.equal(kernel(x), x * 2)
    unset.set(None)
    assert torch.equal(kernel(x), x)


UNGUARDED = ("tensor", "ndarray", "dict_values",  # Dynamo guards none of what these hold, or does not know them
             "of a partial", "class behind", "weak method", "weak dict", "context")  # fmt: skip


@pytest.mark.parametrize("read", [name for name in READS if not any(each in name for each in UNGUARDED)])
def test_a_change_between_two_calls_of_a_graph(read):
    of, change = READS[read]
    x = torch.randn(5)
    for kernel in (eager(of), lazy(of)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, kernel=kernel: kernel(x) + 1, backend="aot_eager", fullgraph=True)
        for factor in (2.0, -0.5, 3.0):
            change(factor)
            assert torch.equal(compiled(x), x * factor + 1)
        change(1.0)


def test_arguments_that_change_between_two_calls():
    @torch_tile.jit(out_idx=[-1], target="cpu")
    def kernel(n, config, table, method):
        @T.prim_func
        def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                for i in T.Parallel(n):
                    y[i] = method(x[i]) * config.factor * table[0].factor

        return main

    class Method:
        factor = 1.0

        def scaled(self, value):
            return value * self.factor

    x, config, inner, holder = torch.randn(5), Config(), Config(), Method()
    for factors in ((2.0, 1.0, 1.0), (2.0, 4.0, 1.0), (2.0, 4.0, 8.0), (2.0, 1.0, 1.0)):
        config.factor, inner.factor, holder.factor = factors
        got = kernel(5, config, [inner], holder.scaled)(x)
        assert torch.equal(got, x * factors[0] * factors[1] * factors[2])


def test_objects_of_any_kind_in_a_graph():
    """Attributes that no graph can read leave it whole, and values that do not change leave the kernel compiled."""

    class Odd:
        def __init__(self):
            self.factor, self.itself, self.lock, self.iterator = 2.0, self, threading.Lock(), iter([1])
            self.array, self.tensor, self.dtype = np.ones(3), torch.ones(2), torch.float32
            self.__dict__["no name"] = 1

        @property
        def broken(self):
            raise RuntimeError("not read")

        def __getattr__(self, name):
            raise AttributeError(name)

    odd, module = Odd(), torch.nn.Linear(2, 2)
    kernel = eager(lambda v: v * odd.factor * module.in_features)
    x = torch.randn(5)
    assert torch.equal(kernel(x), x * 4)
    assert kernel.read_outside() is kernel.read_outside()
    compiled = torch.compile(lambda x: kernel(x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x * 4 + 1)
    odd.array[0] = 2.0
    assert torch.equal(kernel(x), x * 4) and len(kernel.kernels) == 1  # it does not read the array


def test_an_inference_tensor_that_changes_in_place():
    with torch.inference_mode():
        factor = torch.tensor(1.0)
    kernel, x = eager(lambda v: v * float(factor)), torch.randn(5)
    for number in (2.0, 3.0):
        with torch.inference_mode():
            factor.fill_(number)
        assert torch.equal(kernel(x), x * number)


def test_names_of_annotations_only(monkeypatch):
    @torch_tile.jit(target="cpu")
    def kernel(x):
        x: T.Tensor((SIZE,), "float32")
        y = T.empty(x.shape, "float32")
        with T.Kernel(1) as _:
            for i in T.Parallel(x.shape[0]):
                y[i] = x[i] * 2.0
        return y

    for size in (5, 8, 5):
        monkeypatch.setitem(globals(), "SIZE", size)
        x = torch.randn(size)
        assert torch.equal(kernel(x), x * 2)


def test_a_trace_that_changes_what_it_reads_is_not_repeated():
    traces = []

    @torch_tile.jit(target="cpu")
    def kernel(x):
        traces.append(1)
        x: T.Tensor((5,), "float32")
        y = T.empty((5,), "float32")
        with T.Kernel(1) as _:
            for i in T.Parallel(5):
                y[i] = x[i] * 2.0
        return y

    x = torch.randn(5)
    kernel(x)
    count = len(traces)
    assert torch.equal(kernel(x), x * 2) and torch.equal(kernel(x + 1), (x + 1) * 2)
    assert len(traces) == count


def test_a_kernel_in_a_class_that_is_not_bound_yet():
    class Holder:
        factor = 2.0

        @staticmethod
        @torch_tile.jit(target="cpu")
        def kernel(x):
            x: T.Tensor((5,), "float32")
            y = T.empty((5,), "float32")
            with T.Kernel(1) as _:
                for i in T.Parallel(5):
                    y[i] = x[i] * Holder.factor
            return y

    x = torch.randn(5)
    assert torch.equal(Holder.kernel(x), x * 2)
    Holder.factor = 3.0
    assert torch.equal(Holder.kernel(x), x * 3)


def hold(made):
    set_global("REFERENCE", weakref.ref(made))


@torch_tile.jit(target="cpu")
def of_reference(x):
    x: T.Tensor((5,), "float32")
    y = T.empty((5,), "float32")
    with T.Kernel(1) as _:
        for i in T.Parallel(5):
            y[i] = x[i] * REFERENCE().factor
    return y


@torch_tile.jit(target="cpu")
def of_argument(x, holder):
    x: T.Tensor((5,), "float32")
    y = T.empty((5,), "float32")
    with T.Kernel(1) as _:
        for i in T.Parallel(5):
            y[i] = x[i] * holder.factor
    return y


@torch_tile.jit(target="cpu", out_idx=[-1])
def reading(holder):
    @T.prim_func
    def kernel(x: T.Tensor((5,), "float32"), y: T.Tensor((5,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(5):
                y[i] = x[i] * holder.factor

    return kernel


def by_reference(x, made):
    hold(made)
    return of_reference(x)


def by_lazy(x, made):
    return reading(made)(x)


@pytest.mark.parametrize("kind", [Config, torch.nn.Module, Derived], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("call", [of_argument, by_reference, by_lazy], ids=["argument", "reference", "lazy"])
def test_kernels_keep_no_object_alive_that_only_their_keys_name(call, kind):
    """A loop over new modules would keep them all. The last one stays, to see that nothing changed."""
    x, alive = torch.ones(5), []
    for turn in range(4):
        made = kind()
        made.factor = float(turn % 2 + 1)
        alive.append(weakref.ref(made))
        assert torch.equal(call(x, made), torch.full((5,), made.factor))
        del made
    gc.collect()
    assert sum(each() is not None for each in alive) <= 1
