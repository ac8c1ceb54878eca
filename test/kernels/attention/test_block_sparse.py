# SPDX-License-Identifier: Apache-2.0
"""Attention over lists of blocks against float64 attention under the mask that they make; hidden keys are NaN."""

import math

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import backward, block_sparse, forward
from torch_tile.kernels.attention.args import BlockSparseArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.backward import Tilings
from torch_tile.kernels.attention.block_lists import Listed, as_blocks, concatenated_lists
from torch_tile.kernels.attention.block_sparse import (
    attention_block_sparse,
    attention_block_sparse_backward,
    backward_reference,
    reference,
)
from torch_tile.kernels.attention.spec import Config
from torch_tile.kernels.common import Machine

CAP = "v0=div(acc0,2.0);v1=tanh(v0);v2=mul(v1,2.0);ret v2"
BIAS = "y=add(x0,acc0);ret y"
SMALL = Config(16, 16, packed=False)
FORMS = {  # dtype, D, Dv, causal, windowed, score
    "full": (torch.float32, 32, 48, False, False, ""),
    "causal": (torch.bfloat16, 24, 16, True, False, ""),
    "window": (torch.float16, 32, 32, True, True, CAP),
    "bias": (torch.float64, 8, 5, False, False, BIAS),
}


def lists_of(seen, problems):
    """Numbers and indices of a bool tensor of blocks, in random order; what no list reads names no block."""
    counts = seen.sum(-1, dtype=torch.int32)
    order = torch.rand(seen.shape, generator=problems.generator).masked_fill(~seen, 2).argsort(-1).int()
    return counts, order.masked_fill(torch.arange(seen.shape[-1]) >= counts[..., None], problems.pick(-1, 10**6))


def problem(form, problems, longest):
    dtype, d, dv, causal, windowed, score = FORMS[form]
    batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 3)
    heads, queries, keys = kv_heads * groups, problems.size(longest), problems.size(longest)
    block_q, block_kv = problems.pick(16, 32, 48), problems.pick(16, 32, 64)
    q = problems.reordered(batch, heads, queries, d, dtype=dtype)
    k, v = (problems.reordered(batch, kv_heads, keys, n, dtype=dtype) for n in (d, dv))
    shape = problems.pick(1, batch), problems.pick(1, heads), -(-queries // block_q), -(-keys // block_kv)
    part = torch.rand(shape, generator=problems.generator)
    listed = [*lists_of(part < 0.4, problems), None, None]
    if problems.pick(True, False):
        listed[2:] = lists_of(part > 0.7, problems)
    aux = [problems.tensor(queries, keys, dtype=dtype)] if score == BIAS else None
    window = problems.random.randint(1, 40) if windowed else 0
    options = (block_q, block_kv, causal, problems.pick(None, 0.3), window, keys - queries, aux, score)
    args = BlockSparseArgs(q, k, v, *listed, *options)
    return args, problems.reordered(batch, heads, queries, dv, dtype=dtype)


def in_double(args):
    return args._replace(**{name: getattr(args, name).double() for name in "qkv"})


def test_reference_is_attention_under_a_mask(problems):
    """Element by element, from the definition."""
    args, grad = problem("bias", problems, 50)
    named = torch.zeros(args.q.shape[0], args.q.shape[1], args.q.shape[2], args.k.shape[2], dtype=torch.bool)
    for counts, indices in ((args.kv_num_blocks, args.kv_indices), (args.full_kv_num_blocks, args.full_kv_indices)):
        for b, h, i in torch.cartesian_prod(*map(torch.arange, named.shape[:3])).tolist() if counts is not None else ():
            place = min(b, counts.shape[0] - 1), min(h, counts.shape[1] - 1), i // args.block_q
            for block in indices[place][: int(counts[place])].tolist():
                named[b, h, i, block * args.block_kv : (block + 1) * args.block_kv] = True
    wanted = forward.reference(args.q, args.k, args.v, named, *args[9:])
    for got, want in zip(reference(*args), wanted, strict=True):
        torch.testing.assert_close(got, want)
    found = backward_reference(grad, *args[:3], *wanted, *args[3:])
    given = block_sparse.dense(args)._replace(mask=named)
    for got, want in zip(found, backward.gradients(grad, given), strict=False):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, rounds, problems, check, engine, monkeypatch):
    def by_torch(*args, **named):
        raise AssertionError("no kernel ran")

    monkeypatch.setattr(block_sparse, "reference", by_torch)
    monkeypatch.setattr(block_sparse, "backward_reference", by_torch)
    dtype = FORMS[form][0]
    for _ in rounds(2):
        args, grad = problem(form, problems, 48 if engine in ("threads", "text") else 100)
        config = problems.pick(None, SMALL)
        tilings = None if config is None else Tilings(SMALL, SMALL)
        want, want_lse = reference(*in_double(args))
        what = f"{form} {tuple(args.q.shape)} {tuple(args.k.shape)} {args[3:]}"
        out, lse = attention_block_sparse(*args, config=config)
        check(out, want, what, dtype, empty_beside(args.q, want.shape[3]))
        check(lse, want_lse, what, dtype)
        exact = backward_reference(grad.double(), *in_double(args)[:3], None, None, *args[3:])
        found = attention_block_sparse_backward(grad, *args[:3], out, lse, *args[3:], tilings=tilings)
        for got, wanted, like in zip(found, exact, args[:3], strict=True):
            check(got, wanted, what, dtype, empty_beside(like, like.shape[3]), least=1.0)


def test_blocks_that_no_list_names_are_not_read(problems):
    """Keys and values there are NaN."""
    args, grad = problem("full", problems, 150)
    seen = (
        as_blocks(*concatenated_lists([args[3:5], args[5:7]]), -(-args.k.shape[2] // args.block_kv))
        .any(2)
        .any(0)
        .any(0)
    )
    rows = seen.repeat_interleave(args.block_kv)[: args.k.shape[2]]
    k, v = (torch.where(rows[:, None], x, math.nan) for x in (args.k, args.v))
    out, lse = attention_block_sparse(*args._replace(k=k, v=v))
    want, _ = reference(*args)
    torch.testing.assert_close(out, want)
    dq, dk, dv = attention_block_sparse_backward(grad, args.q, k, v, out, lse, *args[3:])
    exact = backward_reference(grad, *args[:3], out, lse, *args[3:])
    torch.testing.assert_close(dq, exact[0])
    for got, wanted in ((dk, exact[1]), (dv, exact[2])):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_lists_joined_and_by_keys(problems):
    part = torch.rand(2, 1, 5, 7, generator=problems.generator)
    first, second = lists_of(part < 0.3, problems), lists_of(part > 0.6, problems)
    both = concatenated_lists([first, second])
    assert torch.equal(as_blocks(*both, 7), (part < 0.3) | (part > 0.6))
    by_keys = Listed(*both, 32, 16).by_keys(7)
    assert torch.equal(as_blocks(by_keys.counts, by_keys.indices, 5), as_blocks(*both, 7).mT)
    assert (by_keys.queries, by_keys.keys) == (16, 32)


def test_values_on_hopper(problems, monkeypatch):
    """Products by wgmma, and the loads of a producer warp that follow the lists. Thread by thread."""

    def call(kernel, *args):
        assert not kernel.interpret(*args)

    for module in (forward, backward, block_sparse):
        monkeypatch.setattr(module, "machine_of", lambda x: Machine(Target("cuda", 90), 132))
    monkeypatch.setattr(JITKernel, "__call__", call)
    q, k, v, grad = (problems.tensor(1, 1, n, 64, dtype=torch.float16, layout="dense") for n in (200, 256, 256, 200))
    seen = torch.tensor([[[[True, False], [True, True]]]])
    args = BlockSparseArgs(q, k, v, *lists_of(seen, problems), causal=True, q_offset=56)
    out, lse = attention_block_sparse(*args, config=Config(128, 64, 256, 2, partial_sums=8, staged=True))
    want, want_lse = reference(*in_double(args))
    torch.testing.assert_close(out.double(), want, atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
    found = attention_block_sparse_backward(grad, *args[:3], out, lse, *args[3:])
    exact = backward_reference(grad.double(), *in_double(args)[:3], None, None, *args[3:])
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=6e-3, rtol=6e-3)
