# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.nn import functional as F

from benchmarks.library import machine_for
from torch_tile.hardware import Target
from torch_tile.kernels.conv.conv import Config, Problem, config_for, conv, differentiable, reference

CONVOLUTIONS = F.conv1d, F.conv2d, F.conv3d


def drawn(problems, few):
    """Sizes, taps, channels, filters, strides, paddings and dilations of a convolution that has results."""
    dims = problems.pick(1, 2, 3)
    most = ((40, 7, 4) if few else (90, 20, 7))[dims - 1]
    sizes, taps = [[problems.size(n) for _ in range(dims)] for n in (most, 3)]
    channels, filters = (problems.pick(8 * problems.size(3), problems.size(20 if few else 40)) for _ in range(2))
    stride, dilation = [[problems.pick(1, 1, 2, 3) for _ in range(dims)] for _ in range(2)]
    padding = [problems.pick(0, 1, 2) for _ in range(dims * problems.pick(1, 2))]
    for n in range(dims):  # so that no window is longer than what it walks over
        taps[n] = min(taps[n], (sizes[n] - 1) // dilation[n] + 1)
    return sizes, taps, channels, filters, (stride, padding, dilation)


def in_torch(x, weight, bias, residual, stride, padding, dilation, activation):
    """The convolution by torch, in float64."""
    dims = len(stride)
    ends = padding if len(padding) == 2 * dims else [n for each in padding for n in (each, each)]
    flat = [n for d in reversed(range(dims)) for n in ends[2 * d : 2 * d + 2]]
    out = CONVOLUTIONS[dims - 1](F.pad(x.movedim(-1, 1), flat), weight.movedim(-1, 1), bias, stride, 0, dilation)
    out = {"none": lambda t: t, "silu": F.silu, "relu": F.relu}[activation](out.movedim(1, -1))
    return out if residual is None else out + residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_random_problems(dtype, rounds, engine, problems, check):
    few = engine in ("threads", "text")
    for _ in rounds(6):
        sizes, taps, channels, filters, window = drawn(problems, few)
        x = problems.reordered(problems.size(2), *sizes, channels, dtype=dtype)
        weight = problems.tensor(filters, *taps, channels, dtype=dtype)
        bias = problems.pick(None, problems.tensor(filters, dtype=dtype))
        activation = problems.pick("none", "silu", "relu")
        given = x, weight, bias, None, *window, activation
        residual = torch.randn_like(reference(*given)) if problems.pick(True, False) else None
        given = *given[:3], residual, *given[4:]
        wide = [None if t is None else t.double() for t in given[:4]]
        check(conv(*given), in_torch(*wide, *window, activation), f"{x.shape} {x.stride()} {weight.shape} {given[4:]}")


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("rows, columns", [(4, 16), (2, 32), (1, 64)])
def test_boxes(rows, columns, persistent, engine, problems, check):
    """Of several rows, of several filters, in several steps, and one block after the other."""
    step = problems.pick(16, 32)
    config = Config(rows, columns, problems.pick(16, 24, 32), step, 128, 3, True, 3 if persistent else 0)
    x, weight = (problems.tensor(*n, 40, dtype=torch.bfloat16, layout="dense") for n in ((1, 2, 7, 21), (36, 2, 3, 1)))
    bias = problems.tensor(36, dtype=torch.bfloat16)
    given = x, weight, bias, problems.tensor(1, 2, 6, 21, 36, dtype=torch.bfloat16)
    options = (), (1, 0, 1, 0, 0, 0), (), "silu"
    found = conv(*given, *options, config=config)
    check(found, in_torch(*(t.double() for t in given), (1, 1, 1), *options[1:2], (1, 1, 1), "silu"), f"{config}")


def test_what_lies_beside_a_window_is_not_read(engine, problems, check):
    """Neither what is behind the last channel or column of a view, nor the rows around it."""
    whole = torch.full((1, 8, 12, 48), torch.nan, dtype=torch.bfloat16)
    x = whole[:, 1:-1, 2:-2, 8:32]
    x.copy_(problems.tensor(1, 6, 8, 24, dtype=torch.bfloat16))
    weight = problems.tensor(16, 3, 3, 24, dtype=torch.bfloat16)
    for stride in (1, 2):
        found = conv(x, weight, stride=(stride, stride), padding=(1, 1))
        check(found, in_torch(x.double(), weight.double(), None, None, (stride,) * 2, (1, 1), (1, 1), "none"), stride)


def test_derivative_is_torchs(problems):
    x, weight, bias = (
        torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((2, 5, 6, 4), (3, 3, 2, 4), (3,))
    )
    window = (2, 1), (1, 0, 2, 1), (1, 2)
    want, found = (
        in_torch(x, weight, bias, None, *window, "silu"),
        differentiable(x, weight, bias, None, *window, "silu"),
    )
    torch.testing.assert_close(found, want)
    grad = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, weight, bias), grad) for y in (found, want)))


@pytest.mark.parametrize("filters", [1, 3, 96, 192, 384, 513])
def test_every_problem_has_a_tiling(filters):
    for target in (Target("cpu"), *(Target("cuda", n) for n in (80, 90, 120))):
        for dtype in (torch.bfloat16, torch.float32):
            for channels, whole in ((16, False), (96, True), (1000, False), (48, True)):
                problem = Problem(dtype, dtype, 4, 720, 1280, filters, channels, target.kind == "cuda", whole)
                config = config_for(problem, machine_for(target))
                assert config is not None and (not whole or channels % config.block_k == 0)
