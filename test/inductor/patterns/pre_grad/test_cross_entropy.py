# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy is captured with its meaning; what is no cross-entropy of class indices stays, with a reason."""

import pytest
import torch
import torch.nn.functional as F

from torch_tile.kernels import kernels

TARGET = torch.tensor([3, 0, -100, 7, 8, 1])
WEIGHT = torch.arange(9) / 4


def shifted(x):
    """As transformers has it: logits widened, then viewed as rows."""
    wide = x.view(2, 3, 9).float()
    labels = F.pad(TARGET.view(2, 3), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(wide.view(-1, 9), labels.view(-1), ignore_index=-100, reduction="sum") / 5


CALLS = {
    "mean": lambda x: F.cross_entropy(x, TARGET),
    "none": lambda x: F.cross_entropy(x, TARGET, reduction="none"),
    "sum smoothed": lambda x: F.cross_entropy(x, TARGET, reduction="sum", label_smoothing=0.2),
    "weighted": lambda x: F.cross_entropy(x, TARGET, WEIGHT.to(x.dtype)),
    "weighted and smoothed": lambda x: F.cross_entropy(x, TARGET, WEIGHT.to(x.dtype), label_smoothing=0.1),
    "another ignored": lambda x: F.cross_entropy(x, TARGET.clamp(min=0), ignore_index=0),
    "one row": lambda x: F.cross_entropy(x[0], TARGET[0]),
    "module": lambda x: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(x, TARGET),
    "shifted": shifted,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, dtype, light, generator):
    f = CALLS[name]
    x = (torch.randn(6, 9, generator=generator) * 3).to(dtype).requires_grad_()
    got, report = light(f, x)
    want = f(x)
    assert [r.status for r in report.select("loss")] == ["replaced"], report
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = 1e-5 if want.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    upstream = torch.rand(want.shape, generator=generator).to(want.dtype)
    ours, eager = (torch.autograd.grad(y, x, upstream)[0] for y in (got, want))
    torch.testing.assert_close(ours, eager, rtol=4 * tolerance, atol=tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_keeps_the_loss_wide(smoothing, light, generator):
    """Products under autocast are narrow, and the loss of their results is not."""
    x, w = (torch.randn(n, 9, generator=generator) for n in (6, 9))

    def f(x):
        return F.cross_entropy(F.linear(x, w), TARGET, label_smoothing=smoothing)

    with torch.autocast("cpu", torch.bfloat16):
        got, report = light(f, x)
        want = f(x)
    assert [r.status for r in report.select("loss")] == ["replaced"], report
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_widened_logits_are_read_narrow(light, generator, monkeypatch):
    module, read = kernels("loss.cross_entropy"), {}
    plain = dict(vars(module))
    for name, place in (("cross_entropy", 0), ("cross_entropy_backward", 1)):

        def note(*args, name=name, place=place, **given):
            read[name] = args[place].dtype
            return plain[name](*args, **given)

        monkeypatch.setattr(module, name, note)
    x = torch.randn(6, 9, generator=generator).bfloat16().requires_grad_()
    light(shifted, x)[0].backward()
    assert read == {"cross_entropy": torch.bfloat16, "cross_entropy_backward": torch.bfloat16}


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: F.cross_entropy(x, torch.softmax(x.detach(), -1)), "probabilities"),
        (lambda x: F.cross_entropy(x.view(1, 9, 6), TARGET.clamp(0).view(1, 6)), "not the last dimension"),
    ],
)
def test_refusals_say_why(f, reason, light, generator):
    x = torch.randn(6, 9, generator=generator, requires_grad=True)
    got, report = light(f, x)
    torch.testing.assert_close(got, f(x))
    assert any(reason in r.reason for r in report.missed("loss")), report
