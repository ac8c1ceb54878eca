# SPDX-License-Identifier: Apache-2.0
import itertools
from dataclasses import replace

import pytest
import torch
from rounding import Rounding

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.linear_attention import step
from torch_tile.kernels.linear_attention.args import GRADIENTS
from torch_tile.kernels.linear_attention.delta import gated_delta_rule, reference
from torch_tile.kernels.linear_attention.delta_backward import gated_delta_rule_backward, gradient_reference
from torch_tile.kernels.linear_attention.delta_torch import normalized
from torch_tile.kernels.linear_attention.segments import segments_for
from torch_tile.kernels.linear_attention.tiles import Config, config_for, scan_config_for

TINY = Config(16, 16, 16, 16, base=8, key_columns=16, key_step=16, threads=32, key_threads=32, stages=1)


def recurrence(q, k, v, g, beta, state=None, starts=None, scale=None, normalize=False):
    """The rule, one time after the other; linear attention if beta is None."""
    g = g if g.dim() == 4 else g[..., None]
    share = v.shape[2] // q.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k = (normalized(t) for t in (q, k)) if normalize else (q, k)
    q, k = (t.repeat_interleave(share, 2) for t in (q, k))
    outs, states, count = [], [], v.shape[0] if starts is None else len(starts) - 1
    first = v.new_zeros(count, v.shape[2], q.shape[3], v.shape[3]) if state is None else state
    parts = [(0, v.shape[1])] if starts is None else itertools.pairwise(starts.tolist())
    for n, (begin, end) in enumerate(parts):
        now = first if starts is None else first[n : n + 1]
        for t in range(begin, end):
            now, error = now * g[:, t].exp()[..., None], v[:, t]
            if beta is not None:
                error = (error - torch.einsum("bhkv,bhk->bhv", now, k[:, t])) * beta[:, t, :, None]
            now = now + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
            outs.append(torch.einsum("bhkv,bhk->bhv", now, q[:, t]) * scale)
        states.append(now)
    return torch.stack(outs, 1), torch.cat(states)


def problem(problems, dtype, most_times, most_keys, most_values, channels=False):
    """Arguments of the rule as keywords, with or without what is optional."""
    packed, groups, shares = problems.pick(False, True), problems.pick(1, 2), problems.pick(1, 2)
    b, length = 1 if packed else problems.size(2), problems.size(most_times)
    shares = 1 if channels else shares
    heads, keys, values, tensor = groups * shares, problems.size(most_keys), problems.size(most_values), problems.tensor
    cuts = sorted(problems.random.randint(0, length) for _ in range(problems.random.randint(0, 3)))
    starts = torch.tensor([0, *cuts, length], dtype=problems.pick(torch.int32, torch.int64)) if packed else None
    normalize = problems.pick(True, False)
    count = len(starts) - 1 if packed else b
    q, k = (tensor(b, length, groups, keys, dtype=dtype) for _ in range(2))
    given = {
        "q": q,
        "k": k if normalize else normalized(k),
        "v": tensor(b, length, heads, values, dtype=dtype),
        "g": -tensor(b, length, heads, *([keys] if channels else [])).abs() * problems.pick(0.1, 1.0, 20.0),
        "beta": tensor(b, length, heads, dtype=dtype).sigmoid(),
        "initial_state": problems.pick(None, tensor(count, heads, keys, values)),
        "cu_seqlens": starts,
    }
    options = {"scale": problems.pick(None, 0.3), "use_qk_l2norm": normalize}
    return given, options, f"{[b, length, groups, heads, keys, values]} {starts} {options}"


def double(given):
    return {name: t if t is None or not t.is_floating_point() else t.double() for name, t in given.items()}


@pytest.mark.parametrize("form", ["rule", "channels", "no rule", "channels, no rule"])
@pytest.mark.parametrize("packed", [False, True])
def test_reference_is_the_recurrence(packed, form, problems):
    def t(*shape):
        return torch.randn(shape, generator=problems.generator, dtype=torch.float64).requires_grad_()

    count, starts = (3, torch.tensor([0, 3, 3, 90])) if packed else (1, None)
    given = [t(1, 90, 2, 5), t(1, 90, 2, 5), t(1, 90, 4, 3)]
    given += [-torch.rand(1, 90, 4, *([5] if "channels" in form else [])).double()]
    given += [None if "no rule" in form else torch.rand(1, 90, 4).double(), t(count, 4, 5, 3)]
    given = [x if x is None or x.requires_grad else x.requires_grad_() for x in given]
    want, got = recurrence(*given, starts, None, True), reference(*given, starts, None, True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(reference(*given, starts, None, True, at_once=True), want)
    grads = [torch.randn_like(y) for y in want]
    expected = torch.autograd.grad(want, [x for x in given if x is not None], grads)
    torch.testing.assert_close(gradient_reference(*grads, *given, starts, None, True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rule", "channels", "no rule", "channels, no rule"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_problems(dtype, form, rounds, engine, problems, check):
    few, channels = engine != "cpu", "channels" in form
    for _ in rounds(2):
        given, options, what = problem(problems, dtype, 40 if few else 150, 16, 20 if few else 90, channels)
        if "no rule" in form:
            given["beta"] = None
        config = replace(TINY, staged=problems.pick(False, True), fused_values=problems.pick(0, 16)) if few else None
        config = replace(config, segments=problems.pick(1, 2, 4)) if few else None
        agree(given, options, config, what, problems, check, gradients=engine != "text")  # which takes too long


def agree(given, options, config, what, problems, check, gradients=True):
    """Compare outputs and gradients of a call with float64."""
    dtype, wide = given["v"].dtype, double(given)
    found = gated_delta_rule(**given, **options, config=config)
    wants, rounding = recurrence(*wide.values(), *options.values()), Rounding(reference, **wide, **options)
    for n, (got, want) in enumerate(zip(found, wants, strict=True)):
        check(got, want, what, dtype, own=True, rounding=rounding[n])
    if not gradients:
        return
    grad = problems.tensor(*given["v"].shape, dtype=dtype)
    grad_state = problems.pick(None, problems.tensor(*found[1].shape))
    found = gated_delta_rule_backward(grad, grad_state, **given, **options, config=config)
    upstream = grad.double(), None if grad_state is None else grad_state.double()
    with torch.no_grad():
        wants = gradient_reference(*upstream, **wide, **options)
    rounding = Rounding(gradient_reference, *upstream, **wide, **options)
    names = [name for name in GRADIENTS if name != "beta" or given["beta"] is not None]
    for n, (name, got, want) in enumerate(zip(names, found, wants, strict=True)):
        check(got, want, f"{name} {what}", dtype, own=True, rounding=rounding[n])


@pytest.mark.parametrize("form", ["rule", "no rule"])
@pytest.mark.parametrize(("segments", "length"), [(2, 33), (4, 70), (4, 20)])
def test_sequences_in_segments(segments, length, form, engine, problems, check):
    """Also where the last segments have no chunk."""
    if engine == "text" and length > 20:
        pytest.skip("takes too long")
    tensor, numbers = problems.tensor, torch.rand(2, 1, length, 2)
    given = {"q": tensor(1, length, 1, 16), "k": normalized(tensor(1, length, 1, 16)), "v": tensor(1, length, 2, 20)}
    given |= {"g": -numbers[0], "beta": numbers[1] if form == "rule" else None}
    given |= {"initial_state": problems.pick(None, tensor(1, 2, 16, 20)), "cu_seqlens": None}
    config = replace(TINY, staged=True, fused_values=16, segments=segments)
    options = {"scale": None, "use_qk_l2norm": False}
    agree(given, options, config, f"{segments} {length}", problems, check, gradients=engine != "text")


def test_keys_in_several_tiles_and_more_than_fit(problems, check):
    for keys in (70, 257):
        q, k = problems.tensor(1, 40, 1, keys), normalized(problems.tensor(1, 40, 1, keys))
        numbers = torch.rand(2, 1, 40, 2)
        given = q, k, problems.tensor(1, 40, 2, 5), -numbers[0], numbers[1]
        for got, want in zip(gated_delta_rule(*given), recurrence(*(t.double() for t in given)), strict=True):
            check(got, want, str(keys), own=True)


@pytest.mark.parametrize("form", ["rule", "channels", "no rule", "channels, no rule"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens(dtype, form, rounds, engine, problems, check):
    for _ in rounds(3):
        given, options, what = problem(problems, dtype, 3, 16, 20, "channels" in form)
        if "no rule" in form:
            given["beta"] = None
        del given["cu_seqlens"]
        b, _, heads, values = given["v"].shape
        state = problems.tensor(b, heads, given["k"].shape[3], values)
        given["initial_state"] = state
        wide = double(given)
        wants, rounding = recurrence(*wide.values(), None, *options.values()), Rounding(reference, **wide, **options)
        del given["initial_state"]
        found = step.gated_delta_rule_step(state, **given, **options)
        for n, (got, want) in enumerate(zip(found, wants, strict=True)):
            check(got, want, what, dtype, own=True, rounding=rounding[n])


def test_a_state_is_updated_in_place(problems):
    given, options, _ = problem(problems, torch.float32, 2, 16, 16)
    del given["cu_seqlens"], given["initial_state"]
    state = torch.randn(given["v"].shape[0], given["v"].shape[2], given["k"].shape[3], given["v"].shape[3])
    out, new = step.reference(state, **given, **options)
    found = step.gated_delta_rule_step(state, **given, **options, new_state=state)
    assert found[1] is state
    torch.testing.assert_close(found, (out, new), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 2, 3), (2, 0, 2, 3), (2, 4, 2, 0)])
def test_empty(shape):
    b, length, heads, values = shape
    q, numbers = torch.randn(b, length, 1, 5), torch.rand(b, length, heads)
    state = torch.randn(b, heads, 5, values)
    given = q, q, torch.randn(shape), -numbers, numbers, state
    out, last = gated_delta_rule(*given)
    assert out.shape == shape and (length or torch.equal(last, state))
    dq, _, dv, _, _, dstate = gated_delta_rule_backward(out, last, *given)
    assert dq.shape == q.shape and dv.shape == shape and dstate.shape == state.shape


@pytest.mark.parametrize(
    ("capability", "states", "packed", "values", "threads"),
    [
        (90, 16, False, 16, 128),
        (90, 17, False, 32, 128),
        (90, 34, False, 64, 128),
        (90, 67, False, 128, 256),
        (90, 67, True, 32, 128),
        (80, 1, False, 32, 128),
    ],
)
def test_blocks_of_the_scan_have_few_values_where_all_run_at_once(capability, states, packed, values, threads):
    machine = Machine(Target("cuda", capability), 132)
    config = config_for(torch.bfloat16, 128, machine)
    found = scan_config_for(config, machine, states, 128, packed)
    assert found == replace(config, value_tile=values, threads=threads)


@pytest.mark.parametrize(
    ("capability", "states", "chunks", "gradients", "segments"),
    [
        (90, 16, 64, False, 4),
        (90, 17, 64, False, 1),
        (90, 8, 64, False, 8),
        (90, 8, 31, False, 4),
        (90, 8, 20, False, 4),
        (90, 8, 19, False, 1),
        (90, 1, 999, False, 16),
        (80, 8, 64, False, 1),
        (90, 16, 64, True, 8),
        (90, 33, 64, True, 4),
        (90, 34, 64, True, 1),
        (90, 8, 64, True, 8),
        (90, 8, 23, True, 1),
    ],
)
def test_sequences_are_cut_into_as_many_segments_as_run_at_once(capability, states, chunks, gradients, segments):
    machine = Machine(Target("cuda", capability), 132)
    config = config_for(torch.bfloat16, 128, machine)
    assert segments_for(config, machine, states, 128, chunks, gradients) == segments
