# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.nn import functional as F

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.ssm.conv import (
    Config,
    causal_conv1d,
    causal_conv1d_backward,
    causal_conv1d_update,
    gradient_config_for,
    gradient_reference,
    reference,
    update_reference,
)


def wide(*tensors):
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_reference_is_torchs(activation, problems):
    x, weight, bias, state = (torch.randn(n, dtype=torch.float64) for n in ((2, 9, 5), (5, 3), (5,), (2, 2, 5)))
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    want = F.conv1d(torch.cat([state, x], 1).mT, weight[:, None], bias, groups=5).mT
    want = F.silu(want) if activation == "silu" else want
    torch.testing.assert_close(reference(x, weight, bias, state, activation), want)
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, leaves, grad)
    found = gradient_reference(grad, *(t.detach() for t in leaves), activation)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_problems(dtype, rounds, engine, problems, check):
    for _ in rounds(5):
        width, activation = problems.pick(1, 2, 3, 4), problems.pick("none", "silu")
        few = engine in ("threads", "text")
        b, length, d = problems.size(3), problems.size(20 if few else 200), problems.size(40 if few else 300)
        x, weight = problems.tensor(b, length, d, dtype=dtype), problems.tensor(d, width, dtype=torch.float32)
        bias = problems.pick(None, problems.tensor(d, dtype=dtype))
        state = problems.pick(None, problems.tensor(b, width - 1, d, dtype=dtype)) if width > 1 else None
        config = problems.pick(None, Config(4, 32)) if few else None
        given, what = (x, weight, bias, state), f"{b} {length} {d} {width} {activation} {x.stride()}"
        check(causal_conv1d(*given, activation, config=config), reference(*wide(*given), activation), what)
        grad = problems.tensor(b, length, d, dtype=dtype)
        config = problems.pick(Config(4, 32, steps=2), Config(8, 16)) if few else None
        found = causal_conv1d_backward(grad, *given, activation, config=config)
        for n, want in enumerate(gradient_reference(*wide(grad, *given), activation)):
            check(found[n], want, f"{what} {n}", dtype)
        state = problems.tensor(b, d, problems.pick(max(1, width - 1), 4), dtype=dtype)
        token = x[:, 0], state, weight, bias
        found = causal_conv1d_update(*token, activation)
        for n, want in enumerate(update_reference(*wide(*token), activation)):
            check(found[n], want, f"{what} update {n}")


@pytest.mark.slow
def test_packed_sequences(engine, rounds, problems, check):
    """Each is as if it were alone, also in its gradients."""
    for _ in rounds(2):
        b, length, d, width = problems.size(2), problems.size(20), problems.size(20), problems.pick(2, 3, 4)
        x, weight, bias = problems.tensor(b, length, d), problems.tensor(d, width), problems.tensor(d)
        grad, ids = problems.tensor(b, length, d), torch.randint(0, 2, (b, length)).cumsum(1).to(torch.int32)
        found = causal_conv1d(x, weight, bias, None, "silu", ids)
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        parts = []
        for n in range(b):
            cuts = ids[n].unique_consecutive(return_counts=True)[1].tolist()
            parts.append(
                torch.cat([reference(p[None], *leaves[1:], None, "silu")[0] for p in leaves[0][n].split(cuts)])
            )
        want = torch.stack(parts)
        check(found, want.detach(), f"{ids}")
        for got, one in zip(
            causal_conv1d_backward(grad, x, weight, bias, None, "silu", ids),
            torch.autograd.grad(want, leaves, grad.double()),
            strict=False,
        ):
            check(got, one, f"{ids} {width}")


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_empty(shape):
    x, weight = torch.randn(shape), torch.randn(shape[2], 4)
    assert causal_conv1d(x, weight).shape == shape
    dx, dweight, *_ = causal_conv1d_backward(x, x, weight)
    assert dx.shape == shape and (dweight == 0).all()


def test_blocks_of_the_gradient_are_few():
    machine = Machine(Target("cuda", 90), 132)
    config = gradient_config_for(8192, 4096, 8, torch.bfloat16, machine)
    blocks = 8 * 64 * -(-8192 // (config.rows * config.steps))
    assert blocks <= 4 * 8 * 132 and config.columns == 64
