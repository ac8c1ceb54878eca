# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_tile.nn as tnn


@pytest.fixture
def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 7, 3), (2, 7, 3, 4)])
def test_as_torchs(shape, weighted, reduction, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 7, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), generator=generator)
    if target.dim():
        target.view(-1)[0] = 3
    weight = torch.rand(7, generator=generator, dtype=torch.float64) if weighted else None
    options = {"ignore_index": -100 if len(shape) == 1 else 3, "reduction": reduction, "label_smoothing": 0.1}
    got, want = (f(x, target, weight, **options) for f in (tnn.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(got, want)
    upstream = torch.rand(want.shape, generator=generator, dtype=torch.float64)
    ours, eager = (torch.autograd.grad(y, x, upstream)[0] for y in (got, want))
    torch.testing.assert_close(ours, eager)


def test_classes_in_bytes_as_torch_takes_them(generator):
    x, weight = torch.randn(5, 7, generator=generator), torch.randn(7, 16, generator=generator)
    target = torch.randint(0, 7, (5,), generator=generator)
    torch.testing.assert_close(tnn.cross_entropy(x, target.byte()), F.cross_entropy(x, target.byte()))
    rows = torch.randn(5, 16, generator=generator)
    torch.testing.assert_close(
        tnn.linear_cross_entropy(rows, weight, target.byte()), F.cross_entropy(rows @ weight.T, target)
    )


def test_module_is_torchs_with_z_loss(generator):
    x, target = torch.randn(6, 9, generator=generator), torch.arange(6)
    loss = tnn.CrossEntropyLoss(torch.arange(9.0), label_smoothing=0.2)
    assert loss.state_dict().keys() == nn.CrossEntropyLoss(torch.arange(9.0)).state_dict().keys()
    torch.testing.assert_close(loss(x, target), F.cross_entropy(x, target, torch.arange(9.0), label_smoothing=0.2))
    with_penalty = tnn.CrossEntropyLoss(z_loss=0.5)(x, target)
    torch.testing.assert_close(with_penalty, F.cross_entropy(x, target) + 0.5 * x.logsumexp(-1).square().mean())


def test_half_precision_gives_float32():
    x = torch.randn(6, 9).bfloat16()
    loss = tnn.cross_entropy(x, torch.arange(6))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(x.float(), torch.arange(6)))


def test_refusals():
    x = torch.randn(6, 9)
    with pytest.raises(TypeError, match="target holds probabilities"):
        tnn.cross_entropy(x, torch.softmax(x, -1))
    with pytest.raises(ValueError, match="reduction is 'max'"):
        tnn.cross_entropy(x, torch.arange(6), reduction="max")
    weight = torch.rand(9, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"weight.detach\(\)"):
        tnn.cross_entropy(x.requires_grad_(), torch.arange(6), weight)


@pytest.mark.parametrize("strange", [-1, 7, 2**40])
def test_targets_that_are_no_class_are_named(strange: int, generator: torch.Generator) -> None:
    logits = torch.randn(5, 7, generator=generator)
    target = torch.randint(7, (5,), generator=generator)
    target[3] = strange
    message = rf"target holds {strange}, which is no class; expected 0 to 6, or ignore_index \(-100\)"
    with pytest.raises(IndexError, match=rf"cross_entropy: {message}"):
        tnn.cross_entropy(logits, target)
    weight = torch.randn(7, 4, generator=generator, requires_grad=True)
    hidden = torch.randn(5, 4, generator=generator)
    with pytest.raises(IndexError, match=rf"linear_cross_entropy: {message}"):
        tnn.linear_cross_entropy(hidden, weight, target)
    assert tnn.cross_entropy(logits, target, ignore_index=strange).isfinite()
