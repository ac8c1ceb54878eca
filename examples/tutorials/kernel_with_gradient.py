# SPDX-License-Identifier: Apache-2.0
"""A kernel in a model, with a gradient: forward and backward are both kernels of yours.

The activation is the square of ReLU (Primer, arXiv:2109.08668). `torch_tile.custom_op` makes a kernel an operator
of torch.
"""

# %%
# Two elementwise kernels over any number of elements.

import torch

import torch_tile
import torch_tile.language as T

BLOCK = 512


@torch_tile.jit(out_idx=[-1])
def forward_kernel():
    n = T.dynamic("n")

    @T.prim_func
    def squared_relu(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, BLOCK), threads=128) as bx:
            for i in T.Parallel(BLOCK):
                positive = T.max(X[bx * BLOCK + i], 0)
                Y[bx * BLOCK + i] = positive * positive

    return squared_relu


@torch_tile.jit(out_idx=[-1])
def backward_kernel():
    n = T.dynamic("n")

    @T.prim_func
    def squared_relu_backward(
        X: T.Tensor((n,), "float32"), dY: T.Tensor((n,), "float32"), dX: T.Tensor((n,), "float32")
    ):
        with T.Kernel(T.ceildiv(n, BLOCK), threads=128) as bx:
            for i in T.Parallel(BLOCK):
                dX[bx * BLOCK + i] = 2 * T.max(X[bx * BLOCK + i], 0) * dY[bx * BLOCK + i]

    return squared_relu_backward


# %%
# `backward(ctx, grad)` returns the gradient of each input. By default `ctx.saved_tensors` holds inputs, then outputs.

squared_relu_grad = torch_tile.custom_op(backward_kernel())


def backward(ctx, grad):
    x, _ = ctx.saved_tensors
    return squared_relu_grad(x, grad.contiguous())


squared_relu = torch_tile.custom_op(forward_kernel(), backward=backward)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        h = self.up(x)
        return self.down(squared_relu(h.flatten()).view_as(h))


# %%
# The gradients are right in eager mode, and the operator stays in one graph under `torch.compile`.

model, x = MLP(), torch.randn(7, 32)
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # or "inductor", or "tile"
exact = model.down(torch.relu(model.up(x)).square())
wanted = torch.autograd.grad(exact.square().sum(), list(model.parameters()))
print("mode      largest error of a gradient")
for name, run in (("eager", model), ("compiled", compiled)):
    found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    print(f"{name:<9} {max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)):.1e}")
