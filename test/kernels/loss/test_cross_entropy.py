# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.loss.cross_entropy import (
    Config,
    config_for,
    cross_entropy,
    cross_entropy_backward,
    gradient_reference,
    loss_reference,
)

OPTIONS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-3)]
SMALL = Config(rows=2, lanes=16, pieces=2, vector=1, is_gpu=True)


def classes(problems, shape, n, dtype=torch.int64):
    """Classes, of which some are to be ignored."""
    found = torch.randint(0, n, shape, generator=problems.generator)
    return torch.where(torch.rand(shape, generator=problems.generator) < 0.2, -100, found).to(dtype)


@pytest.mark.parametrize("label_smoothing, z_loss", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_is_torchs(weighted, label_smoothing, z_loss, problems):
    logits = problems.tensor(9, 13, dtype=torch.float64, layout="dense").requires_grad_()
    target = classes(problems, (9,), 13)
    weight = torch.rand(13, dtype=torch.float64) if weighted else None
    loss, lse = loss_reference(logits, target, weight, -100, label_smoothing, z_loss)
    want = F.cross_entropy(logits, target, weight, label_smoothing=label_smoothing, reduction="none")
    want = want + torch.where(target == -100, 0.0, z_loss * logits.logsumexp(-1).square())
    torch.testing.assert_close(loss, want)
    grad = torch.rand(9, dtype=torch.float64)
    (expected,) = torch.autograd.grad(want, logits, grad)
    given = grad, logits.detach(), target, lse.detach(), weight, -100, label_smoothing, z_loss
    torch.testing.assert_close(gradient_reference(*given), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_random_problems(dtype, rounds, engine, problems, check):
    for _ in rounds(8):
        label_smoothing, z_loss = problems.pick(*OPTIONS)
        shape = problems.pick((problems.size(9),), (problems.size(4), problems.size(5)))
        n = problems.size(90 if engine in ("threads", "text") else 9000)
        logits = problems.tensor(*shape, n, dtype=dtype) * problems.pick(1, 20)
        target = classes(problems, shape, n, problems.pick(torch.int64, torch.int32))
        weight = problems.pick(None, torch.rand(n, generator=problems.generator), torch.ones(n, dtype=dtype))
        config = problems.pick(None, SMALL) if engine in ("threads", "text") else None
        given = target, weight, -100, label_smoothing, z_loss
        what = f"{shape} {n} {given[2:]} {logits.stride()} {config}"
        loss, lse = cross_entropy(logits, *given, config=config)
        wide = target, None if weight is None else weight.double(), *given[2:]
        want, want_lse = loss_reference(logits.double(), *wide)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        check(loss, want, what, sums, own=True)
        check(lse, want_lse, what, sums, own=True)
        grad = problems.tensor(*shape, dtype=sums, layout="dense")
        grad = problems.pick(grad, grad.flatten()[:1].expand(shape))
        out = cross_entropy_backward(grad, logits, target, lse, *given[1:], config=config)
        check(
            out, gradient_reference(grad.double(), logits.double(), target, want_lse, *wide[1:]), what, dtype, own=True
        )


def test_special_values(engine):
    inf, nan = torch.inf, torch.nan
    rows = [[1e4, 0.0, -inf, 3.0], [-1e4, -1e4, -inf, -inf], [nan, 0.0, 1.0, 2.0], [3.0, 1.0, 2.0, inf], [-inf] * 4]
    logits = torch.tensor(rows).repeat_interleave(40, 1)  # more than a lane's
    for target in (0, 70):
        loss, lse = cross_entropy(logits, torch.full((5,), target))
        want, want_lse = loss_reference(logits.double(), torch.full((5,), target))  # no digits of 1e4 + log 40 are lost
        torch.testing.assert_close(loss, want.float(), equal_nan=True)
        torch.testing.assert_close(lse, want_lse.float(), equal_nan=True)


def test_ignored_rows_give_zeros_and_unknown_classes_nan(engine):
    logits = torch.tensor([[1.0, torch.nan, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [torch.inf] * 3])
    target = torch.tensor([-1, 3, -2, -1])
    loss, lse = cross_entropy(logits, target, ignore_index=-1)
    assert torch.equal(loss.isnan(), torch.tensor([False, True, True, False]))
    assert loss[0] == loss[3] == 0
    grad = cross_entropy_backward(torch.ones(4), logits, target, lse, ignore_index=-1)
    assert (grad[[0, 3]] == 0).all() and grad[1:3].isnan().all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), (5,)])
def test_empty_and_single_rows(shape):
    logits = torch.randn(shape)
    target = torch.zeros(shape[:-1], dtype=torch.int64)
    loss, lse = cross_entropy(logits, target)
    assert loss.shape == lse.shape == shape[:-1]
    grad = cross_entropy_backward(torch.ones(shape[:-1]), logits, target, lse)
    assert grad.shape == shape
    if logits.numel():
        torch.testing.assert_close(loss, F.cross_entropy(logits, target))


@pytest.mark.parametrize("n, vector", [(3, 1), (1000, 1), (1000, 8), (32000, 8), (128256, 4)])
def test_tiles_on_gpus(n, vector):
    config = config_for(n, vector, Machine(Target("cuda", 90), 132))
    assert config.threads == 256 and config.vector == vector
    assert config.width * 2 > min(n, 8192) or config.lanes == 32
