# SPDX-License-Identifier: Apache-2.0
"""The kernel of all gradients, by the interpreter of threads: on CPUs there is no such kernel."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.attention import fused_backward
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.backward import attention_backward, reference
from torch_tile.kernels.attention.forward import reference as forward
from torch_tile.kernels.attention.fused_backward import (
    LEAST_KEYS,
    TILINGS,
    WHOLE,
    fused_gradients,
    fused_tiling,
    launch,
)
from torch_tile.kernels.attention.queries_of_keys import PADDING
from torch_tile.kernels.attention.spec import Spec
from torch_tile.kernels.attention.tiling import Problem
from torch_tile.kernels.common import Machine
from torch_tile.simulator.simt import interpreter

HOPPER = Machine(Target("cuda", 90), 132)
FORMS = {  # dtype, head size, causal, windowed
    "full": (torch.bfloat16, 128, False, False),
    "causal": (torch.float16, 64, True, False),
    "window": (torch.bfloat16, 64, True, True),
    "wide": (torch.bfloat16, 192, False, False),
    "wide window": (torch.float16, 192, True, True),
}


def value_width(width):
    return min(width, 128)


def spec_of(dtype=torch.bfloat16, width=128, **facts):
    return replace(
        Spec(dtype, width, value_width(width), True, False, False, None, False, True, 8, shifted=False), **facts
    )


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form, engine, problems, check):
    """Several blocks of queries and keys, of odd lengths, and keys that no query sees."""
    dtype, width, causal, windowed = FORMS[form]
    kv_heads, groups = problems.pick((1, 1), (1, 2), (2, 1))
    alone = problems.pick(False, True) and width <= 128
    # A block that is alone takes three steps at least: a barrier between the warps that store would stop the third one.
    least = 2 * TILINGS[width].block_q * alone
    q_len, kv_len = problems.size(200) + least, problems.size(128 if alone else 300)
    widths = width, value_width(width)
    q, grad = (problems.tensor(1, kv_heads * groups, q_len, n, dtype=dtype, layout="dense") for n in widths)
    k, v = (problems.tensor(1, kv_heads, kv_len, n, dtype=dtype, layout="dense") for n in widths)
    window = problems.random.randint(1, 150) if windowed else 0
    options = (None, causal, problems.pick(None, 0.3, -0.1), window, problems.pick(0, kv_len - q_len, -3, 5, -150))
    out, lse = forward(*(x.float() for x in (q, k, v)), *options)
    ordered = not alone and problems.pick(False, True) and width <= 128
    tiling = replace(TILINGS[width], heavy_first=causal and not ordered, ordered=ordered, side=problems.pick(1, 2))
    members = problems.pick(1, 2, 3) if not (alone or ordered) else 1
    tiling = replace(tiling, alone=alone, members=members, shared_wave=problems.pick(2, 132) if members > 1 else 0)
    got = attention_backward(grad, q, k, v, out.to(dtype), lse, *options, tilings=tiling)
    want = reference(*(x.double() for x in (grad, q, k, v)), out, lse, *options)
    what = f"{form} {tuple(q.shape)} {tuple(k.shape)} {options[1:]}"
    for name, a, b, like in zip(("dq", "dk", "dv"), got[:3], want[:3], (q, k, v), strict=True):
        check(a, b, f"{name} of {what}", dtype, empty_beside(like, like.shape[-1]), 1.0)


def sums_of_dq(config, order):
    """Return the sums of dq by the interpreter of threads, whose blocks run in an `order`, and what it finds."""
    sums, _, found = run_in_order(config, order)
    return sums, found


def run_in_order(config, order):
    """Return the sums of dq and the results, bit for bit, and what the interpreter finds."""
    generator = torch.Generator().manual_seed(int(os.environ.get("TORCH_TILE_TEST_SEED", "0")))
    q, k, v, grad = (torch.randn(1, 1, n, 64, generator=generator).bfloat16() for n in (130, 500, 500, 130))
    out, lse = forward(*(x.float() for x in (q, k, v)))
    given = q.unsqueeze(2), k, v, grad.unsqueeze(2), out.bfloat16().unsqueeze(2), lse.unsqueeze(2)
    results, statistics = [torch.empty_like(x) for x in given[:3]], torch.empty(1, 1, 1, 2, PADDING)
    found, sums = [], []

    class Ordered:
        def kernel(self, function):
            def run(kernel, *operands):
                blocks = None
                if function is fused_gradients:
                    blocks = [(n, 0, 0) for n in order]
                    sums.append(operands[5])
                found.extend(f"{one.kind}: {one.message}" for one in kernel.interpret(*operands, blocks=blocks))

            return lambda *facts: partial(run, function.on(HOPPER.target)(*facts))

    launch(config, spec_of(width=64), Ordered(), given, statistics, results, (0.125, 0, 0))
    return sums[0].view(torch.int32), [x.view(torch.int16) for x in results], found


def test_blocks_add_ordered_in_whatever_order_they_begin():
    """Without turns the last bits tell in which order blocks of keys have added to dq."""
    same = {}
    for ordered in (False, True):
        runs = [sums_of_dq(replace(TILINGS[64], ordered=ordered), order) for order in ((0, 1, 2, 3), (2, 0, 3, 1))]
        assert [found for _, found in runs] == [[], []]
        same[ordered] = runs[0][0].equal(runs[1][0])
    assert same == {False: False, True: True}


def test_members_add_in_one_order_in_whatever_order_they_begin():
    """Four blocks of keys on three multiprocessors leave one for a last wave, which three members share."""
    shared = replace(TILINGS[64], shared_wave=3, members=3)
    runs = [run_in_order(shared, order) for order in ((0, 1, 2, 3, 4, 5), (5, 2, 0, 4, 1, 3))]
    assert [found for *_, found in runs] == [[], []]
    for one, other in zip(*(results[1:] for _, results, _ in runs), strict=True):
        assert one.equal(other)


def test_a_block_waits_for_its_turn(monkeypatch):
    """A block whose turn never comes waits for ever. One that does not wait races with the block before."""
    monkeypatch.setattr(interpreter, "MOST_ITERATIONS", 20)
    with monkeypatch.context() as patch:
        patch.setattr(fused_backward.Order, "before", lambda self, row: self.blocks - self.block)
        _, found = sums_of_dq(replace(TILINGS[64], ordered=True, blocks=2), (0,))
    assert any(one.startswith("endless") for one in found)
    monkeypatch.setattr(fused_backward.Order, "wait", lambda self, tile, before: None)
    _, found = sums_of_dq(replace(TILINGS[64], ordered=True, blocks=3), (0, 1))
    assert any(one.startswith("race: `sums` is written; written by another block") for one in found), found


@pytest.mark.parametrize("form", ["", "ordered", "alone", "shared"])
@pytest.mark.parametrize("width", TILINGS)
def test_the_assembler_has_nothing_to_say(width, form):
    """Products wait for nothing but what the kernel says (C75xx advice tells of others), and no register is spilled."""
    ordered, alone, shared = (form == name for name in ("ordered", "alone", "shared"))
    if width > WHOLE and (ordered or alone):
        pytest.skip("two kernels serve")
    for facts in ({}, {"causal": True}, {"causal": True, "grouped": True, "windowed": True, "shifted": True}):
        ungrouped = {"grouped": False} if ordered or width > WHOLE else {}  # two kernels serve groups there
        spec = spec_of(torch.bfloat16, width, **facts | ungrouped)
        tiling = replace(TILINGS[width], side=1 if alone else 8, ordered=ordered, alone=alone)
        tiling = replace(tiling, shared_wave=132, members=3) if shared else tiling
        kernel = fused_gradients.on(HOPPER.target)(tiling, spec)
        assert not kernel.cubin.warnings
        assert not any(r.spills for r in kernel.resources.values()), spec


def test_which_problems_one_kernel_serves(monkeypatch):
    """Plain scores of half a thousand keys on Hopper; in turns where gradients must be the same from run to run."""
    most, short = Problem(64, 2048, 2048), Problem(64, LEAST_KEYS, LEAST_KEYS, 4)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert fused_tiling(spec_of(), most, HOPPER) == replace(TILINGS[128], side=4)
    assert fused_tiling(spec_of(causal=True), most, HOPPER) == replace(TILINGS[128], side=8, heavy_first=True)
    assert fused_tiling(spec_of(width=64, causal=True), short, HOPPER).side == 32
    assert fused_tiling(spec_of(causal=True), replace(most, keys=8192), HOPPER).side == 4
    for spec, problem, machine in (
        (spec_of(width=96), most, HOPPER), (spec_of(score="v0=mul(acc0,2.0);ret v0"), most, HOPPER),
        (spec_of(exact=False), most, HOPPER), (spec_of(vector=4), most, HOPPER), (spec_of(torch.float32), most, HOPPER),
        (spec_of(), replace(most, keys=LEAST_KEYS - 1), HOPPER),
        (spec_of(), most, Machine(Target("cuda", 80), 108)),
    ):  # fmt: skip
        assert fused_tiling(spec, problem, machine) is None
    single, of_keys = Problem(132, 512, 128), replace(TILINGS[128], alone=True)
    assert fused_tiling(spec_of(grouped=True), single, HOPPER) == of_keys
    assert fused_tiling(spec_of(width=64), single, HOPPER) == replace(TILINGS[64], alone=True)
    assert fused_tiling(spec_of(), replace(single, heads=66), HOPPER) == of_keys
    assert fused_tiling(spec_of(), replace(single, heads=65), HOPPER) is None
    assert fused_tiling(spec_of(), replace(single, keys=129), HOPPER) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert fused_tiling(spec_of(grouped=True), single, HOPPER) == of_keys
    assert fused_tiling(spec_of(causal=True), most, HOPPER) == replace(TILINGS[128], side=8, ordered=True)
    assert fused_tiling(spec_of(), replace(most, heads=3, keys=1000), HOPPER).ordered
    for spec, problem in (
        (spec_of(grouped=True), short), (spec_of(), replace(most, heads=4)), (spec_of(width=192), most),
    ):  # fmt: skip
        assert fused_tiling(spec, problem, HOPPER) is None


def test_which_blocks_share_keys(monkeypatch):
    """Those of a last wave that is not full, if waves are few, blocks equally long, and a member has enough steps."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    shared = {"shared_wave": 132}
    for heads, keys, members in ((2, 4096, 2), (5, 4096, 4), (21, 4000, 3), (32, 8192, 1), (66, 4096, 1), (2, 1024, 1)):
        wanted = {**shared, "members": members} if members > 1 else {}
        found = fused_tiling(spec_of(), Problem(heads, keys, keys), HOPPER)
        assert found == replace(TILINGS[128], side=found.side, **wanted), (heads, keys)
    for facts in ({"causal": True}, {"windowed": True}):
        assert fused_tiling(spec_of(**facts), Problem(2, 4096, 4096), HOPPER).members == 1


def test_wide_heads_take_one_kernel_where_its_blocks_fill_the_machine(monkeypatch):
    """Heads of 192 with values of 128; sums of wider values leave no registers."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    fills = Problem(33, 512, 512)
    assert fused_tiling(spec_of(width=192), fills, HOPPER) == TILINGS[192]
    assert fused_tiling(spec_of(width=192), replace(fills, heads=32), HOPPER) is None
    assert fused_tiling(spec_of(width=192, grouped=True), fills, HOPPER) is None
    assert fused_tiling(spec_of(width=192, tile_dv=192), fills, HOPPER) is None
