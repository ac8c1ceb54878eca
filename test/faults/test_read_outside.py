# SPDX-License-Identifier: Apache-2.0
"""A kernel is compiled for what its function reads from outside: a change between two calls reaches the second."""

import functools

import pytest
import torch

import torch_tile
import torch_tile.language as T


class Config:
    factor = 1.0

    @staticmethod
    def scaled(value):
        return value * NUMBER


NUMBER, SIZE = 1.0, 5
TABLE, LIST, OBJECT, MODULE = {"a": [1.0]}, [1.0], Config(), Config()
MODULE.inner = Config()
TENSOR = torch.tensor(1.0)


def helper(value):
    return value * NUMBER


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
    "a tensor that changes in place": (lambda v: v * float(TENSOR), lambda to: TENSOR.fill_(to)),
    "another function": (lambda v: helper(v), another_helper),
    "what a helper reads": (lambda v: helper(v), lambda to: set_global("NUMBER", to)),
    "what a macro's helper reads": (lambda v: macro(v), lambda to: set_global("NUMBER", to)),
    "what a wrapper reads": (lambda v: decorated(v), lambda to: LIST.__setitem__(0, to)),
    "what a wrapped function reads": (lambda v: decorated(v), lambda to: set_global("NUMBER", to)),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for name in ("NUMBER", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(globals(), "TABLE", {"a": [1.0]})
    monkeypatch.setattr(Config, "factor", 1.0)
    for holder in (OBJECT, MODULE.inner):
        monkeypatch.setattr(holder, "factor", 1.0)
    LIST[0] = 1.0
    TENSOR.fill_(1.0)


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


@pytest.mark.parametrize("read", [name for name in READS if "tensor" not in name])  # Dynamo guards none of its numbers
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
