# SPDX-License-Identifier: Apache-2.0
"""What entry functions plan is what they launch, and nothing is launched meanwhile."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine, has_kernels, machine_of
from torch_tile.kernels.norm.norm import rms_norm
from torch_tile.kernels.norm.softmax import softmax
from torch_tile.runtime.launch_plan import LaunchPlan, TorchCall, Unplanned, current_plan, planning

CPU = Machine(Target("cpu"), 4)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_launches_are_noted_in_their_order(count):
    x, outs = torch.randn(5, 77), [torch.full((5, 77), 7.0) for _ in range(count)]
    with planning(LaunchPlan(machine=CPU)) as plan:
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
    with planning(LaunchPlan(machine=CPU)) as outer:
        with planning(LaunchPlan(machine=Machine(Target("cpu"), 2))) as inner, pytest.raises(RuntimeError):
            assert current_plan() is inner and machine_of(x).num_sms == 2
            raise RuntimeError
        assert current_plan() is outer and machine_of(x) is CPU and has_kernels(x)
        softmax(x)
    assert current_plan() is None and len(outer.launches) == 1 and not inner.launches
    torch.testing.assert_close(softmax(x), x.softmax(-1))


def test_tensors_are_followed_to_their_roots():
    x, y = torch.arange(60.0).view(3, 20), torch.randn(3, 20)
    plan = LaunchPlan([x.detach(), y.detach()])
    a, b = plan.roots
    with planning(plan):
        views = [a[1:, 4:], a.t()[3].view(torch.int32), b.unflatten(1, (4, 5))[:, 2].unbind()[1]]
        made = torch.empty(4, 5)
        part = made.view(20)[7:].as_strided((2,), (3,), 11)
    places = [(plan.root(v), plan.offset(v)) for v in (*views, part)]
    assert places == [(0, 4 * 24), (0, 4 * 3), (1, 4 * 30), (2, 4 * 11)]
    assert plan.address(views[0]) == x.data_ptr() + 4 * 24
    assert plan.given == 2 and plan.root(made) == 2 and len(plan.made) == 1 and not plan.steps
    assert plan.root(torch.ones(2)) is None


TOUCHES = {
    "a copy": lambda x: x.t().contiguous(),
    "a fill": lambda x: x.zero_(),
    "a value": lambda x: x[0, 0].item(),
    "a sum": lambda x: x.sum(),
    "an op of ours": lambda x: torch.ops.tile.rms_norm(x),
    "a write": lambda x: torch.empty(3, 4).copy_(x),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_memory_is_left_alone(touch):
    x = torch.randn(3, 4)
    before = x.clone()
    plan = LaunchPlan([x.detach()])
    with pytest.raises(Unplanned, match="torch is asked for"), planning(plan):
        touch(plan.roots[0])
    assert torch.equal(x, before) and current_plan() is None


def test_copies_and_fills_are_steps_of_a_plan_on_fake_tensors():
    with FakeTensorMode():
        x, out = torch.empty(3, 40), torch.empty(3, 40)
        with planning(LaunchPlan([x, out])) as plan:
            dense = x.t().contiguous().t()
            softmax(dense, out=out)
            out.mul_(dense)
            out.fill_(2.0)
            x.copy_(out)
    steps = [step.name if isinstance(step, TorchCall) else step.function.__name__ for step in plan.steps]
    assert steps == ["aten::clone", "softmax_rows", "aten::mul_", "aten::fill_", "aten::copy_"]
    assert [(c.is_copy, c.is_fill) for c in plan.torch_calls] == [
        (True, False), (False, False), (False, True), (True, False),
    ]  # fmt: skip
    assert [plan.root(c.source) for c in plan.torch_calls if c.is_copy] == [0, 1]
    assert [plan.root(x) for x in plan.launches[0].args] == [2, 1] and len(plan.made) == 1


def test_other_threads_are_not_planned():
    x, outs = torch.randn(3, 8), [torch.zeros(3, 8) for _ in range(2)]
    with planning() as plan:
        thread = threading.Thread(target=lambda: softmax(x, out=outs[0]))
        thread.start()
        thread.join()
        softmax(x, out=outs[1])
    torch.testing.assert_close(outs[0], x.softmax(-1))
    assert len(plan.launches) == 1 and not outs[1].any()
