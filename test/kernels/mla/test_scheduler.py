# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch

from torch_tile.kernels.mla import scheduler
from torch_tile.kernels.mla.decode import EVENLY_SPLIT, mla_decode, reference as decoded
from torch_tile.kernels.mla.scheduler import BEGINNING, BLOCK, Joining, combine_pieces, mla_schedule, plan, reference
from torch_tile.kernels.mla.spec import Config


def pieces(rows, units, lengths):
    """By sequence: (unit, first block, end) of all its pieces; and what each unit has to do, in blocks."""
    found, work = {n: [] for n in range(len(lengths))}, [0] * units
    for unit, (first, begin, last, end) in enumerate(rows[:units]):
        for n in range(first, last + 1):
            start = begin if n == first else 0
            stop = end if n == last else -(-lengths[n] // BLOCK)
            found[n].append((unit, start, stop))
            work[unit] += stop - start + BEGINNING
    return found, work


def some_lengths(problems):
    most = problems.pick(64, 5000, 100_000)
    return [problems.pick(0, 1, BLOCK, problems.random.randint(0, most)) for _ in range(problems.random.randint(0, 70))]


def test_all_positions_have_a_unit_and_no_unit_waits_for_another(problems):
    for _ in range(100):
        lengths, units = some_lengths(problems), problems.pick(1, 2, 5, 66, 132)
        rows = plan(lengths, units)
        assert len(rows) == units + len(lengths)
        found, work = pieces(rows, units, lengths)
        for n, length in enumerate(lengths):
            ends = [0, *(stop for _, _, stop in found[n])]
            assert [start for _, start, _ in found[n]] == ends[:-1] and ends[-1] == -(-length // BLOCK)
            assert rows[units + n] == (found[n][0][0], found[n][-1][0], 0, 0)
            assert sum(1 for unit, *_ in found[n]) == found[n][-1][0] - found[n][0][0] + 1
        fair = sum(-(-length // BLOCK) + BEGINNING for length in lengths) / units
        assert max(work, default=0) <= fair + 2 * BEGINNING + 1, (lengths, units)


@pytest.mark.parametrize("batch, length, shared", [(64, 4096, 0), (128, 4096, 0), (16, 8192, 16), (1, 8192, 1)])
def test_equal_sequences_are_split_only_where_units_would_be_idle(batch, length, shared):
    rows = plan([length] * batch, 66)
    assert sum(first < last for first, last, *_ in rows[66:]) == shared


def test_kernel_makes_the_plan(engine, problems):
    for _ in range(2 if engine == "threads" else 20):
        lengths = torch.tensor(some_lengths(problems), dtype=torch.int32)
        for units in (0, problems.pick(1, 3, 40)):
            assert torch.equal(mla_schedule(lengths, 128, units), reference(lengths, 128, units))


@pytest.mark.parametrize("lengths", [[2**31 - 1, 9], [-5, 9], [-(2**31), 2**31 - 1], [2**31 - 1] * 200])
def test_a_plan_of_senseless_lengths_overflows_nowhere(lengths):
    """A GPU cannot be asked what they are."""
    lengths = torch.tensor(lengths, dtype=torch.int32)
    for units in (1, 5):
        assert torch.equal(mla_schedule(lengths, 128, units), reference(lengths, 128, units))


@pytest.mark.parametrize("heads", [3, 40])
def test_units_decode_what_is_theirs(heads, engine, problems, check):
    """Whole sequences, parts of some, and none; the cache holds NaN past each end."""
    config = Config(block_h=16, block_kv=32)
    for units in (5,) if engine == "threads" else (1, 2, 5, 30):
        lengths = torch.tensor([700, 0, 65, 1000, 1], dtype=torch.int32)
        q, q_pe = (problems.tensor(5, 2, heads, n, layout="dense") for n in (32, 16))
        kv, k_pe = (problems.tensor(5, 1000, n, layout="dense") for n in (32, 16))
        past = torch.arange(1000)[None, :, None] >= lengths[:, None, None]
        kv, k_pe = (x.masked_fill(past, math.nan) for x in (kv, k_pe))
        schedule = mla_schedule(lengths, 2 * heads, units)
        schedule = problems.pick(schedule, schedule.repeat_interleave(2, 1)[:, ::2])  # of any strides
        got = mla_decode(q, q_pe, kv, k_pe, None, lengths, schedule=schedule, config=replace(config))
        want = decoded(*(x.double() for x in (q, q_pe, kv, k_pe)), None, lengths)
        for name, a, b in zip(("out", "lse"), got, want, strict=True):
            check(a, b, f"{name} of {units} units")


@pytest.mark.slow
def test_pieces_are_joined_whatever_a_block_reads_together(engine, rounds, problems, check):
    """Rows that no block has in full, pieces of rows without visible keys, and sequences that are not touched."""
    for _ in range(2) if engine == "threads" else rounds(20):
        lengths, units = some_lengths(problems)[:9] or [70], problems.pick(1, 3, 12)
        rows = problems.random.randint(1, 9)
        table = torch.tensor(plan(lengths, units), dtype=torch.int32)
        found, _ = pieces(table.tolist(), units, lengths)
        part = problems.tensor(2 * units, rows, 16, layout="dense")
        part_lse = 3 * problems.tensor(2 * units, rows, layout="dense")
        unseen = torch.rand(part_lse.shape, generator=problems.generator) < problems.pick(0.0, 0.5)
        part_lse, part = part_lse.masked_fill(unseen, -math.inf), part.masked_fill(unseen[..., None], 0.0)
        out = problems.tensor(len(lengths), 1, rows, 16, layout="dense")
        lse = problems.tensor(len(lengths), rows, layout="dense")
        want, want_lse = out.double(), lse.double()
        for n, own in found.items():
            slots = [unit if begin else units + unit for unit, begin, _ in own]
            if len(own) > 1:
                want[n, 0], want_lse[n] = joined(part[slots].double(), part_lse[slots].double())
        joining = Joining(problems.pick(1, 2, 4), problems.pick(1, 2, 8, 16), problems.pick(32, 64, 128))
        made = scheduler.machine_of(part).kernel(combine_pieces)
        kernel = made(out.dtype, part.dtype, 16, problems.pick(1, 2, 3, 8), joining)
        kernel(table, part, part_lse, out, lse)
        for name, a, b in zip(("out", "lse"), (out, lse), (want, want_lse), strict=True):
            check(a, b, f"{name} of {rows} rows, {units} units and lengths {lengths}, {joining}")


def joined(part, part_lse):
    """Join parts `[pieces, rows, width]` in their own dtype."""
    lse = torch.logsumexp(part_lse, 0)
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(part_lse - lse))
    return (weight[..., None] * part).sum(0), lse


@pytest.mark.parametrize("batch", [1, EVENLY_SPLIT])
def test_few_sequences_need_no_schedule(batch, engine, problems, check):
    """Even splits are their best plan: whatever a schedule says is not read."""
    q, q_pe = (problems.tensor(batch, 2, 3, n, layout="dense") for n in (32, 16))
    kv, k_pe = (problems.tensor(batch, 130, n, layout="dense") for n in (32, 16))
    lengths = torch.tensor(problems.random.choices([0, 1, 70, 130], k=batch), dtype=torch.int32)
    schedule = torch.full((batch + 4, 4), -1, dtype=torch.int32)
    got = mla_decode(q, q_pe, kv, k_pe, None, lengths, schedule=schedule)
    want = decoded(*(x.double() for x in (q, q_pe, kv, k_pe)), None, lengths)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        check(a, b, name)


def test_a_schedule_of_nonsense_reads_and_writes_nothing_else(engine, problems):
    """On a GPU nobody looks whether a schedule is that of the lengths: results are wrong then, but nothing else is."""
    if engine == "threads":
        pytest.skip("blocks that take the same sequence race for its results, as they must")
    lengths = torch.tensor([70] + [130] * EVENLY_SPLIT, dtype=torch.int32)
    batch = len(lengths)
    q, q_pe = (problems.tensor(batch, 1, 3, n, layout="dense") for n in (32, 16))
    kv, k_pe = (problems.tensor(batch, 130, n, layout="dense") for n in (32, 16))
    size = (batch + 3, 4)
    schedule = torch.randint(-(2**31), 2**31, size, dtype=torch.int64, generator=problems.generator).int()
    mla_decode(q, q_pe, kv, k_pe, None, lengths, schedule=schedule, config=Config(16, 32))
    schedule = torch.randint(-3, 9, size, dtype=torch.int32, generator=problems.generator)
    mla_decode(q, q_pe, kv, k_pe, None, lengths, schedule=schedule, config=Config(16, 32))
