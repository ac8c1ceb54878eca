# SPDX-License-Identifier: Apache-2.0
"""Kernels of users inside torch.compile: whole graphs, changed arguments, dynamic sizes, gradients."""

import re
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.jit import compile_program

BACKENDS = ["eager", "inductor", "tile"]


@torch_tile.jit(out_idx=[-1])
def scaled(n, factor):
    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < n:
                    B[bx * 128 + i] = A[bx * 128 + i] * factor

    return kernel


@torch_tile.jit
def raised(n):
    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), by: T.float32):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < n:
                    A[bx * 128 + i] = A[bx * 128 + i] + by

    return kernel


@torch_tile.jit
def copied(n):
    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < n:
                    B[bx * 128 + i] = A[bx * 128 + i]

    return kernel


@torch_tile.jit
def weighted(A, B, by: T.float32):
    n = T.const("n")
    A: T.Tensor((n,), T.float32)
    B: T.Tensor((n,), T.float32)
    C = T.empty((n,), T.float32)
    with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
        for i in T.Parallel(128):
            if bx * 128 + i < n:
                C[bx * 128 + i] = B[bx * 128 + i] + A[bx * 128 + i] * by
    return C


@torch_tile.jit(out_idx=[1, 2])
def split():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((2, n), "float32"), B: T.Tensor((n,), "float32"), C: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < n:
                    B[bx * 128 + i] = A[0, bx * 128 + i]
                    C[bx * 128 + i] = A[1, bx * 128 + i]

    return kernel


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_kernel_is_one_node(backend):
    kernel, x = scaled(300, 2.0), torch.randn(300)
    run = torch.compile(lambda x: kernel(x + 1) * 3, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(x), (x + 1) * 6)


@torch_tile.jit
def split_eager(A):
    n = T.const("n")
    A: T.Tensor((2, n), "float32")
    B, C = T.empty((n,), "float32"), T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
        for i in T.Parallel(128):
            if bx * 128 + i < n:
                B[bx * 128 + i] = A[0, bx * 128 + i]
                C[bx * 128 + i] = A[1, bx * 128 + i]
    return B, C


@pytest.mark.parametrize("style", ["lazy", "eager"])
@pytest.mark.parametrize("way", ["call", "graph", "vmap"])
def test_several_results_are_a_list(way, style):
    kernel, x = split() if style == "lazy" else split_eager, torch.randn(2, 130)
    if way == "call":
        found, want = kernel(x), [x[0], x[1]]
    elif way == "graph":
        found, want = torch.compile(lambda x: kernel(x + 1), fullgraph=True, backend="eager")(x), [x[0] + 1, x[1] + 1]
    else:
        found, want = torch.vmap(kernel)(x[None]), [x[:1], x[1:]]
    assert type(found) is list and len(found) == 2
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_is_made_while_the_graph_is_traced(backend):
    run = torch.compile(lambda x: scaled(x.shape[0], 3.0)(x) - 1, fullgraph=True, dynamic=False, backend=backend)
    for n in (130, 257):
        x = torch.randn(n)
        torch.testing.assert_close(run(x), x * 3 - 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_argument_is_changed_in_order(backend):
    kernel, x = raised(200), torch.randn(200)

    def function(x):
        y = x * 2
        before = y + 0
        kernel(y, 3.0)
        return before, y, y + 1

    before, y, after = torch.compile(function, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close((before, y, after), (x * 2, x * 2 + 3, x * 2 + 4))


def test_an_input_is_changed():
    kernel, x = raised(200), torch.zeros(200)
    torch.compile(lambda x: kernel(x, 2.0), fullgraph=True)(x)
    assert torch.equal(x, torch.full((200,), 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_style(backend):
    x, y = torch.randn(300), torch.randn(300)
    run = torch.compile(lambda x, y: weighted(x, B=y + 1, by=2.0) * 3, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(x, y), (y + 1 + 2 * x) * 3)


def test_dynamic_sizes_need_one_graph():
    kernel, graphs = split(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    run = torch.compile(lambda x: kernel(x)[1] + 1, fullgraph=True, dynamic=True, backend=backend)
    for n in (10, 129, 300):
        x = torch.randn(2, n)
        torch.testing.assert_close(run(x), x[1] + 1)
    assert len(graphs) == 1


@torch_tile.jit
def shifted(A, by, factor, twice=False, block=128):
    n = T.const("n")
    A: T.Tensor((n,), T.float32)
    B = T.empty((n,), T.float32)
    assert all(type(each) is int for each in by) and type(factor) is float and type(twice) is bool
    with T.Kernel(T.ceildiv(n, block), threads=128) as bx:
        for i in T.Parallel(block):
            B[bx * block + i] = (A[bx * block + i] * factor + by[0]) * (2 if twice else 1)
    return B


SYMBOLS = {  # calls with sizes and numbers that Dynamo makes symbols of: a function of a tensor of n elements and n / 3
    "sizes": lambda x, s: weighted(x, x + 1, 2.0),
    "scalars": lambda x, s: weighted(x, x, s),
    "lazy": lambda x, s: scaled(x.shape[0], s)(x),
    "by name": lambda x, s: scaled(factor=2.0, n=x.shape[0])(x),
    "numbers": lambda x, s: shifted(x, (x.shape[0] * 2,), s, block=x.shape[0] + 1, twice=s > 2),
    "a shape": lambda x, s: shifted(x, x.shape, s),
    "a list": lambda x, s: shifted(x, [x.shape[0], 7], 0.5),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("case", SYMBOLS)
def test_symbols_become_numbers_with_a_guard(case, dynamic):
    """A kernel that is compiled for a size or number serves each call of a whole graph, dynamic or not."""
    run = torch.compile(SYMBOLS[case], fullgraph=True, dynamic=dynamic, backend="eager")
    for n in (10, 129, 300, 5, 10):
        x = torch.randn(n)
        torch.testing.assert_close(run(x, n / 3), SYMBOLS[case](x, n / 3))


FAKE_CALLS = {
    "eager style": lambda x: weighted(x, x, 2.0),
    "lazy style": lambda x: scaled.on(f"{x.device.type}")(300, 2.0)(x),
    "graph": torch.compile(lambda x: weighted(x, x, 2.0), backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:7"])
@pytest.mark.parametrize("call", FAKE_CALLS)
def test_fake_tensors_need_neither_their_device_nor_their_mode(call, device):
    """Results have the form and device of a call, in the mode and outside, before and after a call with memory."""
    with FakeTensorMode() as mode:
        x = torch.empty(300, device=device)
        assert FAKE_CALLS[call](x).device == x.device
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            made = FAKE_CALLS[call](x)
            assert isinstance(made, FakeTensor) and made.fake_mode is mode
            assert (made.shape, made.dtype, made.device) == (x.shape, x.dtype, x.device)
            FAKE_CALLS[call](torch.ones(300))


@torch_tile.jit
def checked(A):
    n = T.const("n")
    A: T.Tensor((n,), T.float32)
    B = T.empty((n,), T.float32)
    assert n > 0, "pytest rewrites this statement, and reads names that no author can write"
    with T.Kernel(1, threads=128):
        T.copy(A, B)
    return B


def test_rewritten_assertions_are_read_in_graphs():
    x = torch.randn(9)
    assert torch.equal(torch.compile(lambda x: checked(x), backend="eager", fullgraph=True)(x), x)


def test_tensors_that_compute_in_python_do_so():
    """A tensor that stands for two gives both results, also where a kernel writes its arguments."""
    one, other = torch.randn(200), torch.randn(200)
    made = scaled(200, 3.0)(TwoTensor(one, other))
    torch.testing.assert_close((made.a, made.b), (3 * one, 3 * other))
    pair, kernel = TwoTensor(one.clone(), other.clone()), raised(200)
    kernel(one.clone(), 2.0)  # the form of the call is known
    kernel(pair, 2.0)
    torch.testing.assert_close((pair.a, pair.b), (one + 2, other + 2))


def test_operators_of_equal_text_have_names_of_their_own():
    """Graphs on disk name a kernel by its operator: another process must not mean another kernel by the name."""
    program = copied(211).program
    options = PassOptions(), PassOptions(strict=True)
    made = [compile_program(program, out, "cpu", option) for out in ((), (1,)) for option in options]
    names = {torch_tile.custom_op(kernel).name() for kernel in made}
    assert len(names) == len(made) and len({kernel.source for kernel in made}) == 1
    assert all(re.fullmatch(r"torch_tile_kernels::\w+_[0-9a-f]{12}", name) for name in names), names


def test_kernels_made_later_do_not_recompile_a_graph():
    kernel, graphs = scaled(64, 2.0), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    run = torch.compile(lambda x: kernel(x), fullgraph=True, backend=backend)
    run(torch.ones(64))
    torch.compile(lambda x: scaled(65, 2.0)(x), fullgraph=True, backend="eager")(torch.ones(65))
    run(torch.ones(64))
    assert len(graphs) == 1


def test_an_input_that_requires_gradients_is_refused():
    kernel = scaled(64, 2.0)
    run = torch.compile(lambda x: kernel(x), fullgraph=True, backend="eager")
    with pytest.raises(
        Exception, match=r"argument `A` of kernel requires gradients.*custom_op\(kernel, backward=...\)"
    ):
        run(torch.ones(64, requires_grad=True))
    with torch.no_grad():
        assert torch.equal(run(torch.ones(64, requires_grad=True)), torch.full((64,), 2.0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: scaled(64, 2.0)(x), "argument `A` of kernel requires gradients, and the kernel has none: give"),
        (
            lambda x: weighted(torch.zeros(64), x, 2.0),
            "argument `B` of weighted requires gradients, and the",
        ),
        (lambda x: raised(64)(x, 1.0), "argument `A` of kernel requires gradients, and the kernel writes it, which"),
        (lambda x: copied(64)(torch.ones(64), x), "argument `B` of kernel requires gradients, and the kernel writes"),
        (lambda x: copied(64)(x, x.clone()), "argument `B` of kernel requires gradients, and the kernel writes"),
    ],
    ids=["read", "eager style", "changed", "only written", "read and written"],
)
def test_no_call_loses_a_gradient(call, words, compiled):
    run = torch.compile(call, fullgraph=True, backend="eager") if compiled else call
    x = torch.randn(64, requires_grad=True)
    for given in (x, x * 1):
        with pytest.raises(Exception, match=words) as found:
            run(given).sum().backward()
        assert ".detach()" in str(found.value) and "torch.no_grad()" in str(found.value)
    run(x.detach())
    with torch.no_grad():
        run(x)


def test_a_kernel_below_autograd_is_not_refused():
    """Whoever writes the operator around the kernel gives the gradient."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return scaled(64, 2.0)(x)

        @staticmethod
        def backward(ctx, grad):
            return scaled(64, 2.0)(grad.contiguous())

    @torch.library.custom_op("torch_tile_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return scaled(64, 2.0)(x)

    doubled.register_autograd(lambda ctx, grad: scaled(64, 2.0)(grad.contiguous()))
    for run in (Doubled.apply, doubled):
        x = torch.randn(64, requires_grad=True)
        run(x).sum().backward()
        assert torch.equal(x.grad, torch.full((64,), 2.0))


def test_a_gradient_of_the_authors():
    operator = torch_tile.custom_op(scaled(64, 2.0), backward=lambda ctx, grad: grad * 2)
    for run in (operator, torch.compile(operator, fullgraph=True)):
        x = torch.randn(64, requires_grad=True)
        (run(x) * 3).sum().backward()
        assert torch.equal(x.grad, torch.full((64,), 6.0))


def test_saved_tensors_are_inputs_and_outputs():
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y / x

    operator = torch_tile.custom_op(scaled(64, 2.0), backward=backward)
    x = torch.rand(64).add(1).requires_grad_()
    operator(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((64,), 2.0))


def test_gradients_need_fresh_results():
    with pytest.raises(LaunchError, match="kernel writes `A`: a kernel with a gradient returns fresh tensors"):
        torch_tile.custom_op(raised(64), backward=lambda ctx, grad: grad)


@pytest.mark.parametrize("kernel", ["fresh", "changed", "two"])
def test_opcheck(kernel):
    made, args = {
        "fresh": (scaled(64, 2.0), (torch.randn(64),)),
        "changed": (raised(64), (torch.randn(64), 2.0)),
        "two": (split(), (torch.randn(2, 64),)),
    }[kernel]
    torch.library.opcheck(torch_tile.custom_op(made), args)


def test_arguments_are_checked_while_tracing():
    kernel = scaled(64, 2.0)
    with pytest.raises(Exception, match=r"argument `A` must have dtype torch\.float32"):
        torch.compile(lambda x: kernel(x), fullgraph=True, backend="eager")(torch.ones(64, dtype=torch.float64))


@torch_tile.jit
def raised_eager(A, B):
    m, n = T.const("m, n")
    A: T.Tensor((m, n), "float32")
    B: T.Tensor((m, n), "float32")
    with T.Kernel(m, threads=32) as bx:
        for i in T.Parallel(n):
            B[bx, i] = A[bx, i] * 2
            B[bx, i] = A[bx, i] + 1  # which sees the store before, where both are one tensor


def of_a_result(call, x, w):
    y = x * w
    call(y, y)
    return y + x


def of_an_input(call, x, w):
    call(x, x)
    return x * w


def of_a_view(call, x, w):
    y = (x * w).view(8, 6).t().contiguous().view(6, 8)
    call(y, y)
    return y.view(-1) + y.sum()


def of_two_calls(call, x, w):
    y, z = x * w, torch.empty_like(x)
    call(y, z)
    call(y, y)
    call(z, z)
    return y - z


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [of_a_result, of_an_input, of_a_view, of_two_calls])
@pytest.mark.parametrize("style", ["eager", "compiled"])
def test_one_tensor_for_a_read_and_a_written_parameter(style, function, backend):
    """Graphs copy tensors that operators change; they must not copy one parameter's alone."""
    call = raised_eager if style == "eager" else raised_eager.compile(m=6, n=8)
    x, w = torch.randn(6, 8), torch.randn(6, 8)
    wanted_x, found_x = x.clone(), x.clone()
    want = function(lambda a, b: b.copy_(2 * a + 1) if a is b else b.copy_(a + 1), wanted_x, w)
    found = torch.compile(lambda x, w: function(call, x, w), fullgraph=True, backend=backend)(found_x, w)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(found_x, wanted_x)


def test_operators_for_one_tensor_in_several_places():
    """An operator takes a written tensor once; tensors that are only read stay apart."""
    kernel = raised_eager.compile(m=6, n=8)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    for args, want in (((x, y), x + 1), ((x, x), x * 2 + 1)):
        mine = [args[0].clone()] * 2 if args[0] is args[1] else [a.clone() for a in args]
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(x)
            assert kernel(fake, fake) is None
        torch.func.vmap(lambda a, b: (kernel(a, b), b)[1])(*[m[None] for m in mine])
        torch.testing.assert_close(mine[1], want)
    assert set(kernel.__dict__["operators"]) == {(0, 0), (0, 1)}
