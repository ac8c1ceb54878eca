# SPDX-License-Identifier: Apache-2.0
import itertools
from dataclasses import replace

import pytest
import torch
from rounding import Rounding

from torch_tile.kernels.linear_attention.args import RWKV7_GRADIENTS
from torch_tile.kernels.linear_attention.rwkv7 import (
    gradient_reference,
    reference,
    rwkv7,
    rwkv7_backward,
    rwkv7_step,
    step_reference,
)
from torch_tile.kernels.linear_attention.tiles import Config

TINY = Config(16, 16, 16, 16, base=8, threads=32, key_threads=32, stages=1)


def recurrence(q, k, v, g, a, b, state=None, starts=None, scale=1.0):
    """One time after the other, as the paper has it."""
    count = v.shape[0] if starts is None else len(starts) - 1
    first = v.new_zeros(count, v.shape[2], q.shape[3], v.shape[3]) if state is None else state
    outs, states = [], []
    for n, (begin, end) in enumerate([(0, v.shape[1])] if starts is None else itertools.pairwise(starts.tolist())):
        now = first if starts is None else first[n : n + 1]
        for t in range(begin, end):
            read = torch.einsum("bhkv,bhk->bhv", now, a[:, t])
            now = now * g[:, t].exp()[..., None] + b[:, t, :, :, None] * read[:, :, None]
            now = now + k[:, t, :, :, None] * v[:, t, :, None]
            outs.append(torch.einsum("bhkv,bhk->bhv", now, q[:, t]) * scale)
        states.append(now)
    return torch.stack(outs, 1), torch.cat(states)


def problem(problems, dtype, most_times, most_keys, most_values):
    """Arguments as keywords, with or without what is optional; a and b as RWKV-7 has them."""
    packed, b, length = problems.pick(False, True), problems.size(2), problems.size(most_times)
    b, heads, keys, values = 1 if packed else b, problems.size(3), problems.size(most_keys), problems.size(most_values)
    cuts = sorted(problems.random.randint(0, length) for _ in range(problems.random.randint(0, 3)))
    starts = torch.tensor([0, *cuts, length], dtype=problems.pick(torch.int32, torch.int64)) if packed else None
    tensor, count = problems.tensor, len(starts) - 1 if packed else b
    kept = torch.nn.functional.normalize(tensor(b, length, heads, keys).float(), dim=3)
    given = {
        **{name: tensor(b, length, heads, keys, dtype=dtype) for name in "qk"},
        "v": tensor(b, length, heads, values, dtype=dtype),
        "g": -0.6065 * tensor(b, length, heads, keys).sigmoid(),
        "a": (-kept).to(dtype),
        "b": (kept * tensor(b, length, heads, keys).sigmoid()).to(dtype),
        "initial_state": problems.pick(None, tensor(count, heads, keys, values)),
        "cu_seqlens": starts,
    }
    return given, {"scale": problems.pick(1.0, 0.3)}, f"{[b, length, heads, keys, values]} {starts}"


def double(given):
    return {n: t if t is None or not t.is_floating_point() else t.double() for n, t in given.items()}


@pytest.mark.parametrize("packed", [False, True])
def test_reference_is_the_recurrence(packed, problems):
    def t(*shape):
        return torch.randn(shape, generator=problems.generator, dtype=torch.float64).requires_grad_()

    count, starts = (3, torch.tensor([0, 3, 3, 50])) if packed else (1, None)
    given = [*(t(1, 50, 2, 5) for _ in range(2)), t(1, 50, 2, 3), -torch.rand(1, 50, 2, 5).double()]
    given += [*((t(1, 50, 2, 5) / 5).detach() for _ in range(2)), t(count, 2, 5, 3)]
    given = [x if x.requires_grad else x.requires_grad_() for x in given]
    want, got = recurrence(*given, starts, 0.3), reference(*given, starts, 0.3)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(reference(*given, starts, 0.3, at_once=True), want)
    grads = [torch.randn_like(y) for y in want]
    expected = torch.autograd.grad(want, given, grads)
    torch.testing.assert_close(gradient_reference(*grads, *given, starts, 0.3), expected)
    if not packed:
        *first, state = given
        torch.testing.assert_close(step_reference(state, *first, 0.3), want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_problems(dtype, rounds, engine, problems, check):
    few = engine != "cpu"
    for _ in rounds(2):
        given, options, what = problem(problems, dtype, 20 if few else 90, 16, 20 if few else 70)
        config = replace(TINY, staged=problems.pick(False, True)) if few else None
        found = rwkv7(**given, **options, config=config)
        wide = double(given)
        rounding = Rounding(reference, **wide, **options)
        for n, (got, want) in enumerate(zip(found, recurrence(*wide.values(), options["scale"]), strict=True)):
            check(got, want, what, dtype, own=True, rounding=rounding[n])
        if engine == "text":  # one of its kernels after the other takes too long
            continue
        grad = problems.tensor(*given["v"].shape, dtype=dtype)
        grad_state = problems.pick(None, problems.tensor(*found[1].shape))
        found = rwkv7_backward(grad, grad_state, **given, **options, config=config)
        upstream = grad.double(), None if grad_state is None else grad_state.double()
        with torch.no_grad():
            wants = gradient_reference(*upstream, **wide, **options)
        rounding = Rounding(gradient_reference, *upstream, **wide, **options)
        for n, (name, got, want) in enumerate(zip(RWKV7_GRADIENTS, found, wants, strict=True)):
            check(got, want, f"{name} {what}", dtype, own=True, rounding=rounding[n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens(dtype, rounds, engine, problems, check):
    for _ in rounds(2):
        given, options, what = problem(problems, dtype, 3, 16, 20)
        del given["cu_seqlens"], given["initial_state"]
        b, _, heads, values = given["v"].shape
        state = problems.tensor(b, heads, given["k"].shape[3], values)
        wants = recurrence(*double(given).values(), state.double(), None, options["scale"])
        for got, want in zip(rwkv7_step(state, **given, **options), wants, strict=True):
            check(got, want, what, dtype, own=True)


@pytest.mark.parametrize("shape", [(0, 4, 2, 3), (2, 0, 2, 3), (2, 4, 2, 0)])
def test_empty(shape):
    b, length, heads, _ = shape
    keys, v = [torch.randn(b, length, heads, 5) for _ in range(5)], torch.randn(shape)
    state = torch.randn(b, heads, 5, shape[3])
    out, last = rwkv7(*keys[:2], v, *keys[2:], state)
    assert out.shape == shape and (length or torch.equal(last, state))
    assert rwkv7_backward(out, None, *keys[:2], v, *keys[2:], state)[2].shape == shape
