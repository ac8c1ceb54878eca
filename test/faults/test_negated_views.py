# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory holds the negatives of their numbers, as imaginary parts of conjugates do.

Inductor takes the memory of a graph's argument as it is, and so gave results of the negatives.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError


def imaginary(x: Tensor) -> Tensor:
    """The numbers of x as the imaginary part of a conjugate, whose elements are two apart."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


FORMS = {
    "imaginary": imaginary,
    "dense": lambda x: torch._neg_view(-x),
    "transposed": lambda x: imaginary(x.t().contiguous()).t(),
    "expanded": lambda x: imaginary(x[:1]).expand(x.shape),
    "behind others": lambda x: torch._neg_view(-torch.cat([x, x]))[x.shape[0] :],
    "one row": lambda x: imaginary(x)[:1],
    "no row": lambda x: imaginary(x)[:0],
}


def layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return F.softmax(F.linear(x, w), -1), F.rms_norm(x, (7,)), x.sum(0)


def compiled(f, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(f, backend="tile", options={"select": "tile"}, dynamic=dynamic)


def check(got, wanted) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_arguments_of_graphs(dynamic, seed):
    torch.manual_seed(seed)
    f = compiled(layers, dynamic)
    for name, form in FORMS.items():
        x, w = torch.randn(5, 7), torch.randn(3, 7)
        print(name, dynamic)
        assert form(x).is_neg()
        check(f(form(x), w), layers(form(x), w))
        check(f(x, w), layers(x, w))
    check(f(x, FORMS["dense"](w)), layers(x, w))


@pytest.mark.slow
def test_arguments_that_change_and_want_gradients(seed):
    torch.manual_seed(seed)

    def change(x, w):
        y = F.linear(x, w)
        x.mul_(2)
        return y, F.linear(x, w)

    x, w = torch.randn(5, 7), torch.randn(3, 7)
    a, b = imaginary(x), x.clone()
    check(compiled(change)(a, w), change(b, w))
    assert torch.equal(a, b)
    a, b = imaginary(x).requires_grad_(), x.clone().requires_grad_()
    wanted = torch.autograd.grad(layers(b, w)[0].sin().sum(), b)
    check(torch.autograd.grad(compiled(layers)(a, w)[0].sin().sum(), a), wanted)


def test_operators_and_own_kernels(seed):
    torch.manual_seed(seed)

    @torch_tile.jit(target="cpu")
    def kernel(x):
        n, s = T.const("n, s")
        x: T.StridedTensor((n,), (s,), "float32")
        y = T.empty((n,), "float32")
        with T.Kernel(1) as _:
            for i in T.Parallel(n):
                y[i] = x[i] * 2.0
        return y

    for form in FORMS.values():
        x, w = torch.randn(5, 7), torch.randn(3, 7)
        torch.testing.assert_close(torch.ops.tile.linear(form(x), w), F.linear(form(x), w))
        torch.testing.assert_close(torch.ops.tile.softmax(form(x)), F.softmax(form(x), -1))
        with pytest.raises(LaunchError, match="resolve_neg"):
            kernel(form(x)[:, 0])
