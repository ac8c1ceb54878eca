# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

import torch_tile.language as T
from torch_tile.hardware import Target
from torch_tile.ir.buffer import Buffer
from torch_tile.kernels.common import Machine
from torch_tile.kernels.norm.norm import (
    Config,
    RmsSpec,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    layer_norm_rows,
    rms_norm,
    rms_norm_reference,
    rms_norm_rows,
)
from torch_tile.kernels.norm.tiling import config_for


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 33)])
def test_rms_norm_is_torchs(shape):
    x, w = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    y, total = rms_norm_reference(x, w, None, 1e-5)
    torch.testing.assert_close(y, F.rms_norm(x, shape[-1:], w, 1e-5))
    assert total is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rounding_is_transformers_or_torchs(dtype):
    x, w = torch.randn(9, 65).to(dtype), torch.randn(65).to(dtype)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(rms_norm_reference(x, w)[0], w * normalised.to(dtype), rtol=0, atol=0)
    once = rms_norm_reference(x, w, None, 1e-6, "none", 1.0, False)[0]
    torch.testing.assert_close(once, (normalised * (1.0 + w.float())).to(dtype), rtol=0, atol=0)


def test_promotes_with_the_weight_only_after_the_cast():
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8)
    assert rms_norm_reference(x, w)[0].dtype == torch.float32
    assert rms_norm_reference(x, w, cast_first=False)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_residual_and_activation(activation):
    x, r, w = (torch.randn(n, dtype=torch.float64) for n in ((4, 9), (4, 9), (9,)))
    act = {"gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}.get(activation) or getattr(F, activation)
    y, total = rms_norm_reference(x, w, r, 1e-6, activation)
    torch.testing.assert_close(y, act(F.rms_norm(x + r, (9,), w, 1e-6)))
    torch.testing.assert_close(total, x + r, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 33)])
@pytest.mark.parametrize("affine", [(False, False), (True, False), (False, True), (True, True)])
def test_layer_norm_is_torchs(shape, affine):
    x = torch.randn(shape, dtype=torch.float64) + 3
    w, b = (torch.randn(shape[-1], dtype=torch.float64) if given else None for given in affine)
    y = layer_norm_reference(x, w, b, 1e-3)
    torch.testing.assert_close(y, F.layer_norm(x, shape[-1:], w, b, 1e-3))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)])
def test_empty(shape):
    x, w = torch.randn(shape), torch.randn(shape[-1])
    assert rms_norm_reference(x, w, x)[0].shape == shape
    assert layer_norm_reference(x, w, w).shape == shape


WHOLE, PIECES = Config(rows=4, width=128, whole=True), Config(rows=2, width=32, whole=False)
FORMS = {  # dtype, weight, residual, activation, offset, cast_first
    "plain": (torch.float32, None, False, "none", 0.0, True),
    "weight": (torch.float32, torch.float32, False, "none", 0.0, False),
    "gemma": (torch.bfloat16, torch.bfloat16, False, "none", 1.0, False),
    "residual": (torch.float32, torch.float32, True, "silu", 0.0, True),
    "bfloat16": (torch.bfloat16, torch.bfloat16, True, "none", 0.5, True),
    "promoted": (torch.float16, torch.float32, True, "gelu", 0.0, True),
    "float64": (torch.float64, torch.float64, True, "gelu_tanh", 1.0, True),
}


def random_rows(problems, dtype):
    lead = problems.pick((), (problems.size(20),), (problems.size(5), problems.size(5)))
    return problems.tensor(*lead, problems.size(120), dtype=dtype)


@pytest.mark.parametrize("spec", FORMS)
def test_random_rms_norms(spec, rounds, problems, check):
    dtype, weight_dtype, residual, activation, offset, cast_first = FORMS[spec]
    for _ in rounds(9):
        x = random_rows(problems, dtype) * problems.pick(0.1, 1, 100)
        weight = problems.tensor(x.shape[-1], dtype=weight_dtype) if weight_dtype else None
        other = problems.tensor(*x.shape, dtype=dtype) if residual else None
        options = (problems.pick(1e-6, 0.1), activation, offset, cast_first)
        config = problems.pick(WHOLE, PIECES, None)
        if residual:
            got = add_rms_norm(x, other, weight, *options, config=config)
        else:
            got = rms_norm(x, weight, *options, config=config), None
        want = rms_norm_reference(*(None if t is None else t.double() for t in (x, weight, other)), *options)
        rounded = rms_norm_reference(x, weight, other, *options)
        what = f"{spec} {tuple(x.shape)} {x.stride()}"
        for a, b, c in zip(got, want, rounded, strict=True):
            if a is None:
                assert b is None
                continue
            assert a.dtype == c.dtype
            check(a, b, what, dtype)
        if residual:
            assert torch.equal(got[1], rounded[1]), what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_where_the_reference_does(dtype, engine, problems):
    x, w = problems.tensor(50, 96, dtype=dtype), problems.tensor(96, dtype=dtype)
    for options in (
        (1e-6, "none", 0.0, True),
        (1e-6, "none", 1.0, True),
        (1e-6, "silu", 1.0, True),
        (1e-6, "none", 1.0, False),
    ):
        got, want = rms_norm(x, w, *options), rms_norm_reference(x, w, None, *options)[0]
        assert (got != want).double().mean() < 0.02  # the sum of squares may round otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("affine", [(False, False), (True, False), (False, True), (True, True)])
def test_random_layer_norms(dtype, affine, rounds, problems, check):
    for _ in rounds(8):
        x = random_rows(problems, dtype) + problems.pick(0, 3)
        weight, bias = (problems.tensor(x.shape[-1], dtype=dtype) if given else None for given in affine)
        eps = problems.pick(1e-5, 0.1)
        got = layer_norm(x, weight, bias, eps, config=problems.pick(WHOLE, PIECES, None))
        want = layer_norm_reference(*(None if t is None else t.double() for t in (x, weight, bias)), eps)
        check(got, want, f"{tuple(x.shape)} {x.stride()} {affine}", dtype)


@pytest.mark.parametrize("n", [1, 8192, 8193, 20_000])
def test_long_rows(n, problems, check):
    x, w = problems.tensor(3, n), problems.tensor(n)
    check(rms_norm(x, w), rms_norm_reference(x.double(), w.double())[0], str(n))
    check(layer_norm(x, w, w), layer_norm_reference(x.double(), w.double(), w.double()), str(n))


@pytest.mark.parametrize("n", [2, 8])
def test_rows_that_begin_anywhere_have_weights_that_do(n):
    machine = Machine(Target("cuda", 90), 132)
    config = config_for(n, 1, machine)
    assert config.lanes == 1  # a thread has neighbours, and could read two of a weight at once
    spec = RmsSpec(torch.float16, torch.float16, True, "none", True, False)
    kernels = (
        machine.kernel(rms_norm_rows)(config, spec),
        machine.kernel(layer_norm_rows)(config, *[torch.float16] * 3),
    )
    for kernel in kernels:
        halves = [b.name for b in kernel.program.params if getattr(b, "dtype", None) == T.float16]
        asked = {b.name: kernel.launcher.alignments[b] for b in kernel.program.params if isinstance(b, Buffer)}
        assert len(halves) >= 4 and {asked[name] for name in halves} == {2}
