# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 operands against float64, within the error that rounded weights make; what is hidden is NaN."""

import math

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import forward, fp8
from torch_tile.kernels.attention.args import AttentionFp8Args
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.fp8 import RUN, attention_fp8, key_at, reference, widened
from torch_tile.kernels.common import Machine

E4M3 = torch.float8_e4m3fn
WEIGHT_ERROR = 0.0795  # the largest of a normal number with a linear code
HOPPER, AMPERE = Machine(Target("cuda", 90), 132), Machine(Target("cuda", 80), 108)


def problem(problems, longest):
    batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 3)
    d, dv = problems.pick((64, 32), (32, 48), (40, 17), (16, 128))
    queries, keys = problems.size(longest), problems.size(longest)
    q, k, v = (
        problems.reordered(batch, heads, length, width, dtype=E4M3)
        for heads, length, width in ((kv_heads * groups, queries, d), (kv_heads, keys, d), (kv_heads, keys, dv))
    )
    scales = [
        problems.pick(None, torch.rand(problems.pick(1, batch), problems.pick(1, heads), generator=problems.generator))
        for heads in (kv_heads * groups, kv_heads, kv_heads)
    ]
    causal, window = problems.pick(True, False), problems.pick(0, 0, problems.random.randint(1, 40))
    options = causal, problems.pick(None, 0.3, -0.2, 0.0), window, problems.pick(0, keys - queries, 3)
    return AttentionFp8Args(q, k, v, *scales, *options, problems.pick(torch.float32, torch.bfloat16))


def check_bounds(args, out, lse, rounded, what):
    """Compare with float64: weights are float8 of linear codes, or float16 with 2^-11.

    With relative errors e of weights p, results differ by `sum p e (v - out) / (1 + sum p e)`.
    """
    wide = widened(args, torch.float64)
    want, want_lse = forward.reference(*wide)
    relative, small = (WEIGHT_ERROR, 2**-14.8) if rounded else (2**-11, 2**-18)
    total = relative + small * args.k.shape[2]
    torch.testing.assert_close(
        lse.double(), want_lse, atol=-math.log(1 - total) if rounded else 1e-4, rtol=1e-5, msg=what
    )
    chances, _ = forward.softmax_with_lse(forward.scores(wide))
    sizes = wide.v.abs().repeat_interleave(args.q.shape[1] // args.k.shape[1], 1)
    weighed = (chances * relative + chances.amax(-1, keepdim=True) * small) / (1 - total)
    bound = weighed @ sizes + (chances @ sizes) * 2**-11 + 1e-5
    if rounded:
        bound += weighed.sum(-1, keepdim=True) * want.abs()
    bound += want.abs() * {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[out.dtype]
    error = (out.double() - want).abs() / bound
    assert out.shape == want.shape and out.stride() == empty_beside(args.q, want.shape[3]).stride(), what
    assert not (error > 1).any() and out.isfinite().all(), f"{what}: {float(error.max())} times the bound"
    if rounded and error.numel() > 1000:  # errors of both signs
        assert error.mean() < 0.35, what


def test_reference_is_attention_of_widened_operands(problems):
    args = problem(problems, 60)
    out, lse = reference(*args)
    want, want_lse = forward.reference(*widened(args, torch.float64))
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)


def test_random_problems(rounds, problems, engine, monkeypatch):
    def by_torch(*args, **named):
        raise AssertionError("no kernel ran")

    monkeypatch.setattr(fp8, "reference", by_torch)
    for _ in rounds(4):
        args = problem(problems, 48 if engine in ("threads", "text") else 150)
        out, lse = attention_fp8(*args)
        what = f"{[tuple(x.shape) for x in args[:3]]} {args[3:]}"
        check_bounds(args, out, lse, engine in ("threads", "text"), what)


@pytest.mark.parametrize("machine", [HOPPER, AMPERE], ids=lambda m: m.target.arch)
def test_values_on_gpus(machine, problems, monkeypatch):
    """Both products by wgmma, with weights in registers; or widened to float16. Thread by thread."""
    notes, texts = [], []

    def call(kernel, *args):
        texts.append(kernel.source)
        notes.extend(str(note) for note in kernel.schedule.remarks)
        assert not kernel.interpret(*args)

    monkeypatch.setattr(fp8, "machine_of", lambda x: machine)
    monkeypatch.setattr(JITKernel, "__call__", call)
    q, k, v = (problems.tensor(1, h, n, 64, layout="dense").to(E4M3) for h, n in ((2, 130), (1, 203), (1, 203)))
    args = AttentionFp8Args(q, k, v, torch.tensor([[0.5, 2.0]]), None, None, True, None, 0, 73, torch.float32)
    out, lse = attention_fp8(*args)
    check_bounds(args, out, lse, machine is HOPPER, "")
    products = [note for note in notes if "T.gemm" in note and "m64n" in note]
    assert len(products) >= 2 or machine is AMPERE, notes
    # The exponentials run beside the second product.
    assert any("wgmma_wait<0, true>" in text for text in texts) == (machine is HOPPER)
    assert not any("moved through shared memory" in note for note in notes), notes


@pytest.mark.parametrize("machine", [HOPPER, AMPERE], ids=lambda m: m.target.arch)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_widened_operands_of_gpus(machine, dtype, problems, monkeypatch):
    """Where values are too wide, or float8 is not multiplied, `attention` computes, with scales as exact factors."""
    names = []

    def call(kernel, *args):
        names.append(kernel.program.name)
        assert not kernel.interpret(*args)

    monkeypatch.setattr(fp8, "machine_of", lambda x: machine)
    monkeypatch.setattr(JITKernel, "__call__", call)
    width = 136 if machine is HOPPER else 24
    shapes = (2, 4, 40, 32), (2, 2, 70, 32), (2, 2, 70, width)
    q, k, v = (problems.tensor(*shape, layout="dense").to(E4M3) for shape in shapes)
    uneven = torch.randn(2, 4), torch.randn(problems.pick(1, 2), 2), torch.rand(2, problems.pick(1, 2)) + 0.3
    scales = [problems.pick(None, scale, scale) for scale in uneven]
    args = AttentionFp8Args(q, k, v, *scales, problems.pick(True, False), 0.3, 0, 30, dtype)
    out, lse = attention_fp8(*args)
    assert names == ["attention"]
    check_bounds(args, out, lse, False, str(args[3:]))


def test_keys_past_the_visible_ones_change_nothing(problems):
    """Keys that no query sees hold NaN."""
    q, k, v = (problems.tensor(1, 2, n, 32, layout="dense") for n in (20, 90, 90))
    k[:, :, 20:], v[:, :, 64:] = math.nan, math.nan
    args = AttentionFp8Args(*(x.to(E4M3) for x in (q, k, v)), causal=True)
    out, lse = attention_fp8(*args)
    want, want_lse = attention_fp8(*args._replace(k=args.k[:, :, :20], v=args.v[:, :, :20]))
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_order_of_transposed_keys():
    assert sorted(map(key_at, range(3 * RUN))) == list(range(3 * RUN))
    assert [key_at(n) for n in range(8)] == [0, 1, 8, 9, 2, 3, 10, 11]
