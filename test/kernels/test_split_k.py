# SPDX-License-Identifier: Apache-2.0
"""Kernels that join partial results: values, and loads that run side by side on a GPU."""

import math
import re

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.mla import scheduler
from torch_tile.kernels.mla.scheduler import Joining, combine_pieces
from torch_tile.kernels.split_k import combine, combine_parts, sharing_of


def joined(part, part_lse):
    """Join parts `[splits, ..., width]` in their own dtype."""
    lse = torch.logsumexp(part_lse, 0)
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(part_lse - lse))
    return (weight[..., None] * part).sum(0), lse


def test_any_number_of_parts(engine, rounds, problems, check):
    """Parts without visible keys, rows without any, and more parts than are read together."""
    for _ in rounds(20):
        splits, width = problems.pick(1, 2, 7, 16, problems.random.randint(1, 40)), problems.pick(8, 64)
        shape = problems.size(3), problems.size(3), problems.size(4)
        dtype = problems.pick(torch.float32, torch.float16)
        part = problems.tensor(splits, *shape, width, layout="dense").to(problems.pick(torch.float32, torch.float16))
        part_lse = 3 * problems.tensor(splits, *shape, layout="dense")
        unseen = torch.rand(part_lse.shape, generator=problems.generator) < problems.pick(0.0, 0.3, 0.9)
        part_lse = part_lse.masked_fill(unseen, -math.inf)
        part = part.masked_fill(unseen[..., None], 0.0)
        out, lse = torch.empty(*shape, width, dtype=dtype), torch.empty(shape)
        combine_parts(part, part_lse, out, lse, scheduler.machine_of(part))
        want = joined(part.double(), part_lse.double())
        for name, a, b in zip(("out", "lse"), (out, lse), want, strict=True):
            check(a, b, f"{name} of {splits} parts of {shape}")


def test_an_infinite_part_stays_infinite(engine, problems):
    """Slots without a part give nothing. A copy of the last part times 0 would give NaN."""
    part = problems.tensor(3, 1, 1, 2, 8, layout="dense")
    part[2, ..., 1] = math.inf
    out, lse = torch.empty(1, 1, 2, 8), torch.empty(1, 1, 2)
    combine_parts(part, torch.zeros(3, 1, 1, 2), out, lse, scheduler.machine_of(part))
    assert (out[..., 1] == math.inf).all() and out[..., 2:].isfinite().all()


SM_90 = Target("cuda", 90)
JOINING = {  # by the lines of loads, of values and of log-sum-exps
    "parts": (4, lambda: combine.on(SM_90)(torch.bfloat16, torch.float32, 512, sharing_of(2, 2048))),
    "parts of an element each": (16, lambda: combine.on(SM_90)(torch.half, torch.float32, 128, sharing_of(9, 512))),
    "many parts": (9, lambda: combine.on(SM_90)(torch.half, torch.half, 512, sharing_of(64, 1024))),
    "pieces": (16, lambda: combine_pieces.on(SM_90)(torch.half, torch.half, 512, 8, Joining(1, 8, 128))),
    "pieces of two rows": (16, lambda: combine_pieces.on(SM_90)(torch.half, torch.half, 512, 8, Joining(2, 4, 64))),
    "pieces of four rows": (16, lambda: combine_pieces.on(SM_90)(torch.half, torch.half, 512, 8, Joining(4, 2, 32))),
}


@pytest.mark.parametrize("name", JOINING)
def test_parts_are_loaded_side_by_side(name):
    """A load behind two tests becomes a branch in machine code, and then each load waits for the one before it."""
    count, build = JOINING[name]
    source = build().source
    loads = [line for line in source.splitlines() if re.search(r"\bpart(_lse\[| \+)", line)]
    assert len(loads) == count, source
    for line in loads:
        assert line.count("?") <= 1 and "&&" not in line, line
