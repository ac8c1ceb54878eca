# SPDX-License-Identifier: Apache-2.0
"""Attention over ragged sequences against float64, sequence by sequence; what is read past an end is NaN."""

import math

import pytest
import torch
from rounding import Rounding

from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels import compute_dtype
from torch_tile.kernels.attention import backward, forward, varlen
from torch_tile.kernels.attention.args import AttentionArgs, VarlenArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.backward import Tilings
from torch_tile.kernels.attention.spec import Config
from torch_tile.kernels.attention.varlen import (
    attention_varlen,
    attention_varlen_backward,
    backward_reference,
    reference,
)
from torch_tile.kernels.common import Machine

CAP = "v0=div(acc0,2.0);v1=tanh(v0);v2=mul(v1,2.0);ret v2"
SLOPES = "v=sub(i3,i2);w=mul(x0,v);y=add(w,acc0);ret y"
SMALL = Config(16, 32)
FORMS = {  # dtype, D, Dv, causal, windowed, score
    "full": (torch.float32, 32, 48, False, False, ""),
    "causal": (torch.float32, 24, 16, True, False, ""),
    "window": (torch.float16, 32, 32, True, True, ""),
    "cap": (torch.bfloat16, 32, 32, True, False, CAP),
    "slopes": (torch.float64, 8, 5, False, True, SLOPES),
}


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def problem(form, problems, longest):
    """Arguments of a call, and the gradient of its result. Rows of no sequence hold NaN."""
    dtype, d, dv, causal, windowed, score = FORMS[form]
    count, kv_heads, groups = problems.pick(1, 3, 4), problems.pick(1, 2), problems.pick(1, 3)
    queries = [problems.pick(0, 1, problems.size(longest)) for _ in range(count)]
    keys = [problems.pick(n, 0, problems.size(longest)) for n in queries]
    rows, key_rows = (max(1, sum(n) + problems.pick(0, 3)) for n in (queries, keys))
    heads = kv_heads * groups
    q = problems.reordered(rows, heads, d, dtype=dtype)
    layout = problems.pick("dense", "gaps")
    k, v = (problems.tensor(key_rows, kv_heads, n, dtype=dtype, layout=layout) for n in (d, dv))
    grad = problems.tensor(rows, heads, dv, dtype=dtype)
    cu_q, cu_k = starts_of(queries), starts_of(keys)
    for x, starts in ((q, cu_q), (k, cu_k), (v, cu_k), (grad, cu_q)):
        x[int(starts[-1]) :] = math.nan
    aux = [problems.tensor(heads, 1, 1), problems.tensor(count, 1, 1, 1)][:1] if score == SLOPES else None
    window = problems.random.randint(1, 30) if windowed else 0
    options = (causal, problems.pick(None, 0.3), window, aux, score)
    return VarlenArgs(q, k, v, cu_q, cu_k, max(queries), max(keys), *options), grad


def in_double(args):
    return args._replace(**{name: getattr(args, name).double() for name in "qkv"})


def by_sequence(args, grad):
    """Results and gradients of the dense reference for each sequence alone; what belongs to none is 0."""
    q, k, v = (x.transpose(0, 1)[None] for x in args[:3])
    out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -math.inf)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for b in range(len(args.cu_seqlens_q) - 1):
        rows, keys = (slice(*starts[b : b + 2].tolist()) for starts in (args.cu_seqlens_q, args.cu_seqlens_k))
        offset = (keys.stop - keys.start) - (rows.stop - rows.start)
        seen = (None, args.causal, args.scale, args.window, offset, args.aux, args.score)
        dense = AttentionArgs(q[:, :, rows], k[:, :, keys], v[:, :, keys], *seen)
        out[:, :, rows], lse[:, :, rows] = forward.reference(*dense)
        made = backward.gradients(grad.double().transpose(0, 1)[None][:, :, rows], dense)
        for result, new, place in zip(found, made, (rows, keys, keys), strict=False):
            result[:, :, place] = new
    return out[0].transpose(0, 1), lse[0], [x[0].transpose(0, 1) for x in found]


def test_reference_is_each_sequence_alone(problems):
    for _ in range(10):
        args, grad = problem("slopes", problems, 20)
        out, lse, gradients = by_sequence(args, grad)
        for got, want in zip(reference(*args), (out, lse), strict=True):
            torch.testing.assert_close(got, want)
        made = backward_reference(grad, *args[:3], out, lse, *args[3:])
        for got, want in zip(made, gradients, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, rounds, problems, check, engine, monkeypatch):
    def by_torch(*args, **named):
        raise AssertionError("no kernel ran")

    monkeypatch.setattr(varlen, "reference", by_torch)
    monkeypatch.setattr(varlen, "backward_reference", by_torch)
    dtype = FORMS[form][0]
    for _ in rounds(5):
        args, grad = problem(form, problems, 60 if engine in ("threads", "text") else 150)
        config = problems.pick(None, SMALL)
        tilings = None if config is None else Tilings(SMALL, SMALL)
        out, lse = attention_varlen(*args, config=config)
        want, want_lse, gradients = by_sequence(in_double(args), grad)
        rounding = Rounding(by_sequence, in_double(args), grad.double(), dtype=compute_dtype(dtype))
        # Gradients come from the result, weights and their gradients, all of which are rounded to dtype.
        narrow = Rounding(by_sequence, in_double(args), grad.double(), dtype=dtype)
        what = f"{form} {tuple(args.q.shape)} {args.cu_seqlens_q} {args.cu_seqlens_k} {args[7:]}"
        check(out, want, what, dtype, empty_beside(args.q, want.shape[2]), rounding=rounding[0])
        check(lse, want_lse, what, dtype, rounding=rounding[1])
        if not args.k.numel():
            continue
        found = attention_varlen_backward(grad, *args[:3], out, lse, *args[3:], tilings=tilings)
        for n, (got, exact, like) in enumerate(zip(found, gradients, args[:3], strict=True), 2):
            check(got, exact, what, dtype, empty_beside(like, like.shape[2]), own=True, rounding=narrow[n])


HOPPER = Machine(Target("cuda", 90), 132)


@pytest.mark.parametrize("causal", [True, False])
def test_values_on_hopper(causal, monkeypatch):
    """The schedule of dense kernels: roles, and products in flight beside the softmax. Thread by thread."""
    notes = []

    def call(kernel, *args):
        notes.extend(str(note) for note in kernel.schedule.remarks)
        assert not kernel.interpret(*args)

    for module in (forward, backward, varlen):
        monkeypatch.setattr(module, "machine_of", lambda x: HOPPER)
    monkeypatch.setattr(JITKernel, "__call__", call)
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(n, h, 64, generator=g).half() for n, h in ((141, 2), (140, 1), (140, 1), (141, 2)))
    starts = starts_of([70, 0, 3, 66]), starts_of([30, 5, 0, 103])
    for x, cu in ((q, starts[0]), (k, starts[1]), (v, starts[1]), (grad, starts[0])):
        x[int(cu[-1]) :] = math.nan
    args = VarlenArgs(q, k, v, *starts, 70, 103, causal)
    config = Config(64, 64, 128, 2, partial_sums=8, staged=True, heavy_first=causal)
    out, lse = attention_varlen(*args, config=config)
    want, want_lse, gradients = by_sequence(in_double(args), grad)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
    found = attention_varlen_backward(grad, *args[:3], out, lse, *args[3:])
    for got, exact in zip(found, gradients, strict=True):
        torch.testing.assert_close(got.double(), exact, atol=4e-3, rtol=4e-3)
    beside = [note for note in notes if "beside the arithmetic of the iteration before" in note]
    assert len(beside) == 2, notes  # of the forward and of dq
