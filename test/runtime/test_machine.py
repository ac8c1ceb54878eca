# SPDX-License-Identifier: Apache-2.0
"""A machine gives the kernels of its target; inside `planning` it records their calls."""

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.norm.softmax import softmax
from torch_tile.runtime.launch_plan import LaunchPlan, planning, tensors_in
from torch_tile.runtime.machine import Machine

MACHINES = [Machine(Target("cpu"), 4), Machine(Target("cuda", 80), 108), Machine(Target("cuda", 90), 132)]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_equal_machines_share_their_tilings(machine):
    same = Machine(machine.target, machine.num_sms)
    assert same == machine and hash(same) == hash(machine)
    assert machine not in [each for each in MACHINES if each is not machine]
    assert machine != Machine(machine.target, machine.num_sms + 1)
    assert machine.is_gpu == (machine.target.kind == "cuda")


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_kernels_are_those_of_the_target_and_are_recorded_in_a_plan(machine):
    x, out = torch.randn(3, 40), torch.full((3, 40), 7.0)
    with planning(LaunchPlan(machine=machine)) as plan:
        softmax(x, out=out)
    assert bool((out == 7.0).all()), "a kernel ran inside a plan"
    (launch,) = plan.launches
    assert out.data_ptr() in [each.data_ptr() for each in tensors_in(launch.args)]
    assert launch.function.target == machine.target
