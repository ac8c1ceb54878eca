# SPDX-License-Identifier: Apache-2.0
"""Users' kernels under torch.func, torch.autograd.functional, checkpoints and hooks.

Each gives what autograd gives, or an error: tangents of forward mode were lost without a word.
"""

import pytest
import torch
from torch.autograd import forward_ad, functional
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_tile
import torch_tile.language as T

X = torch.arange(5.0) - 2


@torch_tile.jit(out_idx=[1], target="cpu")
def squared():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as b:
            for i in T.Parallel(64):
                y[b * 64 + i] = x[b * 64 + i] * x[b * 64 + i]

    return kernel


def keep_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def twice(ctx, grad):
    return (2 * ctx.saved_tensors[0] * grad,)


@pytest.fixture(scope="module")
def kernel():
    return squared.compile()


@pytest.fixture(params=["default context", "own context"])
def square(request, kernel):
    own = {"setup_context": keep_input} if request.param == "own context" else {}
    return torch_tile.custom_op(kernel, backward=twice, **own)


class Scaled(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f, self.w = f, torch.nn.Parameter(torch.arange(5.0))

    def forward(self, x):
        return self.f(self.w * x)


def leaf():
    return X.clone().requires_grad_()


def by_hook(f):
    x = leaf()
    x.register_hook(lambda g: g * 3)
    f(x).sum().backward()
    return x.grad / 3


def by_saved_hooks(f):
    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        y = f(x)
    return torch.autograd.grad(y.sum(), x)[0]


def by_checkpoint(f):
    x = leaf()
    return torch.autograd.grad(checkpoint(lambda t: f(t) * 1, x, use_reentrant=False).sum(), x)[0]


def by_batched_gradients(f):
    x = leaf()
    return torch.autograd.grad(f(x), x, torch.eye(5), is_grads_batched=True)[0].diag()


REVERSE = {  # each gives 2 * X
    "grad": lambda f: grad(lambda x: f(x).sum())(X),
    "vjp": lambda f: vjp(f, X)[1](torch.ones(5))[0],
    "grad of grad": lambda f: grad(lambda x: grad(lambda t: (t * f(t)).sum())(x).sum())(X) / 3,
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(torch.stack([X, X]))[1],
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum())(torch.stack([X, X]))[1],
    "jacrev": lambda f: jacrev(f)(X).diag(),
    "hessian": lambda f: jacrev(grad(lambda x: (x * f(x)).sum()))(X).diag() / 3,
    "jacobian": lambda f: functional.jacobian(f, X).diag(),
    "jacobian at once": lambda f: functional.jacobian(f, X, vectorize=True).diag(),
    "functional hessian": lambda f: functional.hessian(lambda x: (x * f(x)).sum(), X).diag() / 3,
    "functional vjp": lambda f: functional.vjp(f, X, torch.ones(5))[1],
    "functional jvp": lambda f: functional.jvp(f, X, torch.ones(5))[1],
    "hvp": lambda f: X * functional.hvp(lambda x: f(x).sum(), X, torch.ones(5))[1],
    "functional_call": lambda f: grad(lambda w: functional_call(Scaled(f), {"w": w}, (torch.ones(5),)).sum())(X),
    "checkpoint": by_checkpoint,
    "hook": by_hook,
    "saved tensor hooks": by_saved_hooks,
    "batched gradients": by_batched_gradients,
    "make_fx": lambda f: make_fx(grad(lambda x: f(x).sum()))(X + 1)(X),
    "torch.compile": lambda f: torch.compile(lambda x: grad(lambda t: f(t).sum())(x), backend="aot_eager")(X),
}
VALUES = {  # each gives X * X
    "vmap": lambda f: vmap(f)(torch.stack([-X, X]))[1],
    "vmap of columns": lambda f: vmap(f, in_dims=1, out_dims=1)(torch.stack([-X, X], 1))[:, 1],
    "functionalize": lambda f: functionalize(f)(X),
    "make_fx of values": lambda f: make_fx(f)(X + 1)(X),
    "gradients of nothing": lambda f: grad(lambda x: (x * f(x.detach())).sum())(X),
}


def dual(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, torch.ones(5)))).tangent


FORWARD = {
    "jvp": lambda f: jvp(f, (X,), (torch.ones(5),))[1],
    "jacfwd": lambda f: jacfwd(f)(X).diag(),
    "linearize": lambda f: linearize(f, X)[1](torch.ones(5)),
    "dual": dual,
    "functional": lambda f: functional.jacobian(f, X, vectorize=True, strategy="forward-mode").diag(),
    "hessian": lambda f: hessian(lambda x: (x * f(x)).sum())(X),
}


@pytest.mark.parametrize("way", REVERSE)
def test_gradients_of_own_kernels(way, square):
    torch.testing.assert_close(REVERSE[way](square), 2 * X)


@pytest.mark.parametrize("way", VALUES)
def test_values_of_own_kernels(way, square, kernel):
    """A kernel alone is called as an operator: it read memory that tensors of transforms do not have."""
    for f in (square, kernel, torch_tile.custom_op(kernel)):
        torch.testing.assert_close(VALUES[way](f), X * X)


@pytest.mark.parametrize("way", REVERSE)
def test_a_kernel_without_a_gradient_refuses_it(way, kernel):
    words = "requires gradients, and the kernel has none"
    for f in (kernel, torch_tile.custom_op(kernel)):
        with pytest.raises(Exception, match=words):
            REVERSE[way](f)


@pytest.mark.parametrize("way", FORWARD)
def test_no_tangent_is_lost(way, square, kernel):
    for f in (square, kernel, torch_tile.custom_op(kernel)):
        if way == "hessian" and f is not square:
            continue  # refused for its gradient
        with pytest.raises(NotImplementedError, match="an argument has a tangent"):
            FORWARD[way](f)


def test_empty_batches(square, kernel):
    """They have shapes and gradients, as torch's operators give them."""
    nothing = torch.zeros(5, 0)
    for f in (square, kernel):
        assert vmap(f, in_dims=1, out_dims=1)(nothing).shape == (5, 0)
    weight = torch.ones(5, requires_grad=True)
    by_x, by_weight = grad(lambda x, w: vmap(lambda a: square(a) * square(w))(x).sum(), (0, 1))(nothing.T, weight)
    assert by_x.shape == (0, 5) and torch.equal(by_weight, torch.zeros(5))
    x = torch.zeros(0, 3, 4)
    assert vmap(lambda a: torch.ops.tile.softmax(a, -1))(x).shape == (0, 3, 4)
    q, k = torch.zeros(0, 2, 4, 7, 8), torch.randn(2, 2, 5, 8)
    out, lse = vmap(torch.ops.tile.attention_lse, (0, None, None))(q, k, k)
    assert out.shape == (0, 2, 4, 7, 8) and lse.shape == (0, 2, 4, 7)


def test_batches_of_kernels_that_write_arguments():
    @T.prim_func
    def add(x: T.Tensor((5,), "float32"), y: T.Tensor((5,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(5):
                y[i] = y[i] + x[i]

    made = torch_tile.compile(add, target="cpu")
    x, y = torch.stack([X, 2 * X]), torch.zeros(2, 5)
    vmap(lambda a, b: (made(a, b), b)[1])(x, y)
    assert torch.equal(y, x)
    assert vmap(lambda a, b: (made(a, b), b)[1])(x[:0], y[:0]).shape == (0, 5)
    with pytest.raises(ValueError, match="without a batch"):
        vmap(lambda a: (made(a, y[0]), a)[1])(x)
