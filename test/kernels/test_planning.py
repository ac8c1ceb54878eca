# SPDX-License-Identifier: Apache-2.0
"""What entry functions plan is what they launch, and nothing is launched meanwhile."""

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine, has_kernels, machine_of
from torch_tile.kernels.norm.norm import rms_norm
from torch_tile.kernels.norm.softmax import softmax
from torch_tile.kernels.planning import current_plan, planning

CPU = Machine(Target("cpu"), 4)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_launches_are_noted_in_their_order(count):
    x, outs = torch.randn(5, 77), [torch.full((5, 77), 7.0) for _ in range(count)]
    with planning(CPU) as plan:
        for n, out in enumerate(outs):
            softmax(x, out=out) if n % 2 else rms_norm(x, out=out)
    assert [launch.kernel.__name__ for launch in plan.launches] == ["rms_norm", "softmax", "rms_norm"][:count]
    assert all(bool((out == 7.0).all()) for out in outs), "a kernel ran"
    for launch in plan.launches:  # made later, they do what the calls would have done
        launch.kernel(*launch.args)
    for n, out in enumerate(outs):
        torch.testing.assert_close(out, x.softmax(-1) if n % 2 else torch.nn.functional.rms_norm(x, (77,), eps=1e-6))


def test_plans_end_with_their_context():
    x = torch.randn(3, 8)
    with planning(CPU) as outer:
        with planning(Machine(Target("cpu"), 2)) as inner, pytest.raises(RuntimeError):
            assert current_plan() is inner and machine_of(x).units == 2
            raise RuntimeError
        assert current_plan() is outer and machine_of(x) is CPU and has_kernels(x)
        softmax(x)
    assert current_plan() is None and len(outer.launches) == 1 and not inner.launches
    torch.testing.assert_close(softmax(x), x.softmax(-1))
