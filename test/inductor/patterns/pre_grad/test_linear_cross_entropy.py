# SPDX-License-Identifier: Apache-2.0
"""A head whose logits only a loss reads is replaced together with the loss; one that is read elsewhere stays."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_tile.nn as tnn
from torch_tile.inductor.context import LinearLossOperands, LossOptions
from torch_tile.inductor.select import decide
from torch_tile.inductor.select.training import compete_linear_loss
from torch_tile.inductor.settings import Settings

TARGET = torch.tensor([[3, 0, -100], [7, 8, 1]])
WEIGHT = torch.arange(9) / 4


def shifted(x, w, b):
    """As transformers has it: widened logits, shifted labels, rows."""
    logits = F.linear(x, w).float()
    labels = F.pad(TARGET, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, 9), labels.view(-1), ignore_index=-100, reduction="sum") / 5


def shifted_logits(x, w, b):
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 9).float(), TARGET[..., 1:].reshape(-1))


def capped(x, w, b):
    logits = torch.tanh(F.linear(x, w, b) / 2.0) * 2.0
    return F.cross_entropy(logits.float().view(-1, 9), TARGET.view(-1))


def of(x, w, b, **options):
    return F.cross_entropy(F.linear(x, w, b).view(-1, 9), TARGET.view(-1), **options)


CALLS = {
    "mean": of,
    "none": lambda *x: of(*x, reduction="none"),
    "sum smoothed": lambda *x: of(*x, reduction="sum", label_smoothing=0.2),
    "weighted": lambda *x: of(*x, weight=WEIGHT.to(x[0].dtype), label_smoothing=0.1),
    "shifted": shifted,
    "shifted logits": shifted_logits,
    "capped": capped,
    "torch's own": lambda x, w, b: F.linear_cross_entropy(x.flatten(0, 1), w, TARGET.flatten(), linear_bias=b),
    "our layer": lambda x, w, b: F.cross_entropy(torch.ops.tile.linear(x, w, b).flatten(0, 1), TARGET.flatten()),
}


def leaves(generator, dtype):
    shapes = (2, 3, 5), (9, 5), (9,)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def gradients(y, upstream, given):
    return torch.autograd.grad(y, given, upstream, allow_unused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, dtype, light, generator):
    if name == "torch's own" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no F.linear_cross_entropy")
    f = CALLS[name]
    given = leaves(generator, dtype)
    got, report = light(f, *given)
    want = f(*given)
    assert [r.what.split("(")[0] for r in report.select("loss")] == ["tile.linear_cross_entropy"], report
    assert [r.status for r in report.select("loss")] == ["replaced"], report
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    upstream = torch.rand(want.shape, generator=generator).to(want.dtype)
    for ours, eager in zip(*(gradients(y, upstream, given) for y in (got, want)), strict=True):
        assert (ours is None) == (eager is None)
        if ours is not None:
            torch.testing.assert_close(ours, eager, rtol=4 * tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scaled_losses_have_gradients_in_float16(reduction, light, generator):
    """No row of many vanishes, and a scale beyond float16's largest number leaves no infinity."""
    rows, scale = 8192, 2.0**17
    target = torch.randint(9, (rows,), generator=generator)

    def loss(x, w):
        return F.cross_entropy(F.linear(x, w).float(), target, reduction=reduction)

    given = [torch.randn(n, 5, generator=generator).mul(size).half() for n, size in ((rows, 1), (9, 1 / 64))]
    got, report = light(loss, *(t.requires_grad_() for t in given))
    assert [r.status for r in report.select("loss")] == ["replaced"], report
    exact = [t.detach().double().requires_grad_() for t in given]
    upstream = torch.tensor(scale if reduction == "mean" else scale / rows)
    for ours, want in zip(gradients(got, upstream, given), gradients(loss(*exact), upstream, exact), strict=True):
        assert (ours - want).norm() < 6e-4 * want.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_gradients_that_nobody_wants_are_not_computed(frozen, light, generator):
    given = leaves(generator, torch.float32)
    given[frozen].requires_grad_(False)
    given[2].requires_grad_(False)
    got, report = light(shifted, *given)
    assert [r.status for r in report.select("loss")] == ["replaced"], report
    wanted = given[1 - frozen]
    ours, eager = (torch.autograd.grad(y, wanted)[0] for y in (got, shifted(*given)))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def kept_logits(x, w, b):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.view(-1, 9), TARGET.view(-1)), logits


def other_views(x, w, b):
    return F.cross_entropy(F.linear(x, w).mT.reshape(-1, 9), TARGET.view(-1))


@pytest.mark.parametrize("f", [kept_logits, other_views])
def test_logits_that_are_read_elsewhere_stay(f, light, generator):
    given = leaves(generator, torch.float32)
    got, report = light(f, *given)
    torch.testing.assert_close(got, f(*given))
    assert not any("linear" in r.what for r in report.select("loss")), report


def test_without_gradients(light, generator):
    given = leaves(generator, torch.float32)
    with torch.no_grad():
        got, report = light(capped, *given)
        torch.testing.assert_close(got, capped(*given), rtol=1e-5, atol=1e-5)
    assert [r.what.split("(")[0] for r in report.select("loss")] == ["tile.linear_cross_entropy"], report


@pytest.mark.parametrize("classes, wins", [(64, False), (128256, True)])
def test_a_head_that_leaves_out_large_logits_may_be_a_little_slower(classes, wins, monkeypatch):
    monkeypatch.setattr(decide.benchmark, "times", lambda *_: (104.0, 100.0))
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, 32, dtype=torch.bfloat16, requires_grad=True) for n in (2048, classes))
        tensors = LinearLossOperands(hidden, weight, torch.empty(2048, dtype=torch.int64), None, None)
    options = LossOptions(-100, "mean", 0.0)
    assert compete_linear_loss(tensors, options, None, Settings()).tile_wins == wins


def test_module_is_a_linear_layer_and_a_loss(generator):
    layer = tnn.LinearCrossEntropyLoss(5, 9, bias=True, softcap=2.0, label_smoothing=0.1)
    assert layer.state_dict().keys() == torch.nn.Linear(5, 9).state_dict().keys()
    x = torch.randn(2, 3, 5, generator=generator, requires_grad=True)
    logits = torch.tanh(F.linear(x, layer.weight, layer.bias) / 2) * 2
    got, want = layer(x, TARGET), F.cross_entropy(logits.view(-1, 9), TARGET.view(-1), label_smoothing=0.1)
    torch.testing.assert_close(got, want)
    given = [x, layer.weight, layer.bias]
    torch.testing.assert_close(torch.autograd.grad(got, given), torch.autograd.grad(want, given))
