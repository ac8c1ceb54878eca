# SPDX-License-Identifier: Apache-2.0
"""By the interpreter of threads, which looks for races and missing waits; on CPUs there is no such kernel."""

import math
import re
from dataclasses import replace

import pytest
import torch
from mutation import removals

from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.mla.decode import mla_decode, reference
from torch_tile.kernels.mla.hopper import flash_mla_hopper
from torch_tile.kernels.mla.scheduler import reference as planned
from torch_tile.kernels.mla.spec import HOPPER, Spec
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret

TURNS = HOPPER[0]
FORMS = {  # dtype, latent, positions of a page
    "float16": (torch.float16, 512, 0),
    "bfloat16": (torch.bfloat16, 256, 0),
    "paged": (torch.bfloat16, 512, 64),
    "paged_narrow": (torch.float16, 128, 192),
}
in_threads = pytest.mark.parametrize("engine", ["threads"], indirect=True)


def paged_cache(problems, batch, length, lengths, latent, dtype):
    """Pages in any order, with NaN past each sequence's end and in those that no sequence has."""
    page = problems.pick(64, 128, 192)
    columns = -(-length // page)
    pages = batch * columns + 1
    table = torch.randperm(pages, generator=problems.generator)[: batch * columns].reshape(batch, columns).int()
    kv, k_pe = (torch.full((pages, page, n), math.nan, dtype=dtype) for n in (latent, 64))
    for b in range(batch):
        for first in range(0, int(lengths[b]), page):
            count = min(page, int(lengths[b]) - first)
            for cache in (kv, k_pe):
                cache[table[b, first // page], :count] = problems.tensor(
                    count, cache.shape[2], dtype=dtype, layout="dense"
                )
    unused = torch.arange(columns) * page >= lengths[:, None]
    return kv, k_pe, table.masked_fill(unused, problems.pick(-1, 9999))


@in_threads
@pytest.mark.parametrize("spec", FORMS)
def test_random_problems(spec, engine, problems, check):
    """Odd lengths, empty sequences, NaN behind them, several queries that see each other's past, shares."""
    dtype, latent, paged = FORMS[spec]
    batch, q_len, heads = problems.pick(1, 2), problems.pick(1, 1, 3), problems.pick(20, 64, 70)
    q, q_pe = (problems.tensor(batch, q_len, heads, n, dtype=dtype, layout="dense") for n in (latent, 64))
    length, table = problems.size(330), None
    lengths = torch.tensor([problems.random.randint(0, length) for _ in range(batch)], dtype=torch.int32)
    if paged:
        kv, k_pe, table = paged_cache(problems, batch, length, lengths, latent, dtype)
    else:
        kv, k_pe = (problems.tensor(batch, length, n, dtype=dtype, layout="dense") for n in (latent, 64))
        if problems.pick(True, False):
            lengths = None
        else:
            past = torch.arange(length)[None, :, None] >= lengths[:, None, None]
            kv, k_pe = (x.masked_fill(past, math.nan) for x in (kv, k_pe))
    splits, scale = problems.pick(1, 1, 2, 3), problems.pick(None, 0.08, -0.05)
    config = replace(TURNS, split=splits > 1)
    got = mla_decode(q, q_pe, kv, k_pe, table, lengths, scale, splits, config=config)
    want = reference(*(x.double() for x in (q, q_pe, kv, k_pe)), table, lengths, scale)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        what = f"{name} of {spec} {tuple(q.shape)} {tuple(kv.shape)} {lengths} {splits} {scale}"
        check(a, b, what, dtype, empty_beside(q, latent) if name == "out" else None)


@in_threads
@pytest.mark.parametrize("units", [1, 3, 5])
@pytest.mark.parametrize("paged", [False, True])
def test_units_of_a_schedule(paged, units, engine, problems, check):
    """A block goes through whole sequences, empty ones among them, and leaves parts of others to be joined."""
    lengths = torch.tensor(problems.random.sample([0, 1, 70, 200, 330], 4), dtype=torch.int32)
    q, q_pe = (problems.tensor(4, 1, 64, n, dtype=torch.float16, layout="dense") for n in (128, 64))
    if paged:
        kv, k_pe, table = paged_cache(problems, 4, 330, lengths, 128, torch.float16)
    else:
        kv, k_pe = (problems.tensor(4, 330, n, dtype=torch.float16, layout="dense") for n in (128, 64))
        past, table = torch.arange(330)[None, :, None] >= lengths[:, None, None], None
        kv, k_pe = (x.masked_fill(past, math.nan) for x in (kv, k_pe))
    schedule = planned(lengths, 1, units)
    got = mla_decode(q, q_pe, kv, k_pe, table, lengths, schedule=schedule, config=TURNS)
    want = reference(*(x.double() for x in (q, q_pe, kv, k_pe)), table, lengths)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        check(a, b, f"{name} of {lengths} {units}", torch.float16)


@in_threads
@pytest.mark.parametrize("slope", [0.0, 0.05, 0.4, -0.2, 30.0])
def test_scores_that_grow_along_the_sequence(slope, engine, check):
    """The maxima that one warpgroup finds are followed by the other, in each tile, seldom, or never."""
    q, q_pe, kv = torch.randn(1, 1, 64, 128).half(), torch.randn(1, 1, 64, 64).half(), torch.randn(1, 330, 128).half()
    k_pe = torch.randn(1, 330, 64).half()
    q_pe[..., 0], k_pe[..., 0] = 8.0, torch.arange(330) * slope
    got = mla_decode(q, q_pe, kv, k_pe, config=TURNS)
    want = reference(*(x.double() for x in (q, q_pe, kv, k_pe)))
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        check(a, b, f"{name} of slope {slope}", torch.float16)


@pytest.mark.parametrize("spec", FORMS)
def test_the_assembler_has_nothing_to_say(spec):
    """Products wait for nothing but what the kernel says (C75xx advice tells of others), and no register is spilled."""
    dtype, latent, paged = FORMS[spec]
    for case in ({"whole": True}, {}, {"split": True}, {"folded": False}, {"scheduled": True}):
        made = Spec(dtype, latent, 64, paged, False, case.pop("folded", True), 8, case.pop("whole", False))
        kernel = flash_mla_hopper.on(Target("cuda", 90))(replace(TURNS, **case), made)
        assert not kernel.cubin.warnings
        assert not any(r.spills for r in kernel.resources.values()), (made, case)


@pytest.mark.parametrize("page", [64, 192])
def test_first_copies_wait_for_one_load(page):
    """The producer looks up no page of a next pair before it copies the first pair, nor divides by the splits."""
    spec = Spec(torch.bfloat16, 512, 64, page, False, True, 8, False)
    text = flash_mla_hopper.on(Target("cuda", 90))(replace(TURNS, split=True), spec).source
    producer = text[text.index("tile::set_registers<24, false>") : text.index("tile::set_registers<240")]
    before, copies = producer.split("tma_load(", 1)
    assert before.count("others_0[") == 2 and copies.count("others_0[") == 2
    assert "q_map" not in producer and not re.search(r"floordiv[^;]*splits", before)


@pytest.mark.slow
def test_each_wait_and_arrival_is_needed():
    """Only the last pair lets left halves go for nobody; what the compiler adds is tested elsewhere."""
    spec = Spec(torch.float16, 128, 64, 0, False, True, 8, False)
    kernel = flash_mla_hopper.on(Target("cuda", 90))(TURNS, spec)
    length = torch.tensor([443], dtype=torch.int32)
    q, q_pe, kv, k_pe = (torch.randn(1, n, d).half() for n, d in ((64, 128), (64, 64), (480, 128), (480, 64)))
    kv[:, 443:], k_pe[:, 443:] = math.nan, math.nan

    def finds(program):
        out, lse = torch.full((1, 64, 128), math.nan).half(), torch.full((1, 1, 64), math.nan)
        return interpret(program, kernel.program, (q, q_pe, kv, k_pe, length, out, lse, 0.07)).found

    flat = lower(kernel.program, cuda_passes(Build(Target("cuda", 90))))
    assert not finds(flat)
    names = ("mbarrier_wait", "mbarrier_arrive", "named_barrier_arrive", "wgmma_wait")
    missed = [r for r in removals(flat, names) if not finds(r.program)]
    assert [r.name for r in missed] == 2 * ["mbarrier_arrive"], [f"{r.name} at {r.span}" for r in missed]
