# SPDX-License-Identifier: Apache-2.0
"""The sorting of tokens by expert, on all engines, against plain torch."""

import pytest
import torch

from torch_tile.kernels.moe import group


@pytest.mark.parametrize("shape, count", [((7, 2), 3), ((300, 3), 9), ((1,), 1), ((513,), 70)])
def test_groups(shape, count, engine, problems):
    if engine in ("threads", "text") and shape[0] == 513:
        pytest.skip("takes seconds and has no other path than 300 x 3")
    experts = torch.randint(-1, count + 2, shape, generator=problems.generator)
    experts = experts.to(problems.pick(torch.int32, torch.int64))
    order, place, offsets = group.group_tokens(experts, count)
    flat = experts.flatten()
    known = torch.where((flat >= 0) & (flat < count), flat, count)
    assert torch.equal(order.long(), known.sort(stable=True).indices)
    assert torch.equal(order[place.flatten().long()].long(), torch.arange(flat.numel()))
    assert offsets.tolist() == [int((known <= e).sum()) for e in range(count)]
