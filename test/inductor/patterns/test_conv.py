# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_tile

OPTIONS = {"select": "tile", "families": ["conv"]}


class Video(nn.Module):
    """A causal convolution behind a norm, with the frames before; one of images; and one of odd channels."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv3d(16, 16, 3), nn.Conv3d(16, 7, (3, 1, 1), bias=False)
        self.image = nn.Conv2d(7, 8, 3, stride=(2, 1), padding=1, dilation=(1, 2))

    def forward(self, x, before):
        x = F.silu(F.normalize(x, dim=1) * 4.0)
        x = self.first(F.pad(torch.cat([before, x], 2), (1, 1, 1, 1, 0, 0)))
        x = self.second(F.pad(F.silu(x), (0, 0, 0, 0, 2, 0)))
        return self.image(x[:, :, -1])


def stored(x, last):
    """The tensor with its channels last in memory, or first."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(
        memory_format=formats.get(x.dim(), torch.contiguous_format) if last else torch.contiguous_format
    )


@pytest.mark.parametrize("last", [False, True])
def test_a_video(last, seed):
    model = Video()
    for weight in model.parameters():
        weight.data = stored(weight.data, last)
    x, before = (stored(torch.randn(1, 16, 2, 9, 11), last) for _ in range(2))
    with torch.no_grad():
        want = model(x, before)
        report = torch_tile.explain(model, x, before, options=OPTIONS)
        got = torch.compile(model, backend="tile", options=OPTIONS)(x, before)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    found = [row.what for row in report.select("conv")]
    assert len(report.replaced("conv")) == 3, report
    assert "padding [0, 0, 1, 1, 1, 1]" in found[0] and "padding [2, 0, 0, 0, 0, 0]" in found[1], found


def padded_with_ones(x, w):
    return F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), w)


def cropped(x, w):
    return F.conv2d(F.pad(x, (-1, 1, 2, 0)), w, padding=1)


def padded_channels(x, w):
    return F.conv2d(F.pad(x[:, :4], (0, 0, 0, 0, 1, 1)), w)


def used_twice(x, w):
    y = F.pad(x, (0, 2, 1, 0))
    return F.conv2d(y, w) + y.mean()


@pytest.mark.parametrize("function", [padded_with_ones, cropped, padded_channels, used_twice])
def test_paddings(function, seed):
    """Only zeros around rows and columns are the kernel's own."""
    x, w = torch.randn(2, 6, 9, 8), torch.randn(5, 6, 3, 3)
    report = torch_tile.explain(function, x, w, options=OPTIONS)
    assert len(report.replaced("conv")) == 1, report
    found = torch.compile(function, backend="tile", options=OPTIONS)(x, w)
    torch.testing.assert_close(found, function(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [
    lambda x, w: F.conv2d(x, w[:, :3], groups=2),
    lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1)),
])  # fmt: skip
def test_what_no_kernel_computes_says_why(function, seed):
    report = torch_tile.explain(function, torch.randn(2, 6, 9, 8), torch.randn(4, 6, 3, 3), options=OPTIONS)
    assert not report.replaced("conv") and "transposed or of groups" in str(report)


def test_training(seed):
    x, w = torch.randn(2, 6, 9, 8, requires_grad=True), torch.randn(5, 6, 3, 3, requires_grad=True)

    def loss(x, w):
        return F.conv2d(x, w, padding=1).square().mean()

    want = torch.autograd.grad(loss(x, w), (x, w))
    got = torch.autograd.grad(torch.compile(loss, backend="tile", options=OPTIONS)(x, w), (x, w))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
