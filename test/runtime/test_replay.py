# SPDX-License-Identifier: Apache-2.0
"""Replayed functions ask the driver for what the functions ask for; the driver is a stand-in, tensors are the CPU's."""

import logging
import random

import pytest
import torch
from fake_cuda import count_as_gpu

import torch_tile.language as T
from torch_tile.compiler.sources import CudaSource, Entry, MapArg
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import Target
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Const
from torch_tile.ir.stmt import dimensions
from torch_tile.kernels.common import Machine
from torch_tile.runtime import replay
from torch_tile.runtime.cuda_launch import CudaLauncher
from torch_tile.runtime.launch_plan import current_plan
from torch_tile.runtime.native_launch import native
from torch_tile.runtime.replay import LongWay, replayed


@pytest.fixture(autouse=True)
def gpu(fake_cuda, monkeypatch):
    """CPU tensors count as a GPU's."""
    assert native() is not None
    count_as_gpu(monkeypatch)
    fake_cuda.number("slots").value = 6


class Kernel:
    """A kernel that is asked for as families ask for theirs. It is also its function, for all targets."""

    def __init__(self, launcher):
        self.launcher = launcher

    def on(self, target):
        return self

    def __call__(self, *args):
        """Of no arguments the kernel, of a kernel's its call."""
        return self.launcher.begin(*args) if args else self

    def begin(self, *args):
        Machine(Target("cpu"), 1).kernel(self)()(*args)


def launcher(alignment=4, has_map=False):
    """out = x + y * scale: x, y, out, m, the stride of x, a number, and perhaps x's map."""
    m, s = T.dynamic("m, s")

    @T.prim_func
    def add(x: T.StridedTensor((m, 8), (s, 1), "float32"), y: T.Tensor((m, 8), "float32"), scale: T.float32,
            out: T.Tensor((m, 8), "float32")):  # fmt: skip
        with T.Kernel(m, threads=32) as b:
            for j in T.Parallel(8):
                out[b, j] = x[b, j] + y[b, j] * scale

    program = add.program
    rows, step = dimensions(program)
    args = [0, 1, 2, rows, step, program.params[2]]
    if has_map:
        last = Const(8, int32), Const(1, int32)
        args.append(MapArg(0, (rows, last[0]), (step, last[1]), (1, 8), 0, "float32", 4))
    entry = Entry("kernel", tuple(args), program.kernels[0].grid, 32, 0, None, "PPPiqf" + "M" * has_map, False)
    return Kernel(CudaLauncher(program, CudaSource("", (entry,), (alignment,) * 3), b"\x7fELF", Target("cuda", 90)))


def asked(fake_cuda, call, *args):
    """What the driver is asked for: the arguments of each launch."""
    fake_cuda.launches()
    call(*args)
    return [(list(r.grid), list(r.slots[:6])) for r in fake_cuda.launches()]


def test_replays_what_it_saw(fake_cuda):
    add = launcher()
    calls = []

    def twice(x, y, out):
        calls.append(1)
        rows = x.flatten(0, 1)
        middle = torch.empty(rows.shape, dtype=torch.promote_types(x.dtype, y.dtype))
        add.begin(rows, y.expand(*x.shape).reshape(rows.shape), 0.5, middle)
        add.begin(middle[1:], out.view_as(rows)[:-1], 2.0, middle[:-1])
        add.begin(middle, middle, 3.0, out.view(rows.shape))

    site = replayed("ttt", twice)
    for shape in ((3, 4, 8), (2, 1, 8), (3, 4, 8), (5, 6, 8), (2, 1, 8), (5, 6, 8), (3, 4, 8), (5, 6, 8)):
        x, y, out = (torch.randn(shape) for _ in range(3))
        found = asked(fake_cuda, site, x, y, out)
        rows = shape[0] * shape[1]
        middle = found[0][1][2]
        assert middle % 4 == 0 and middle not in {t.data_ptr() for t in (x, y, out)}
        number = {
            v: int.from_bytes(bytes(torch.tensor([float(v)]).view(torch.uint8).tolist()), "little") for v in (0.5, 2, 3)
        }
        assert found == [
            ([rows, 1, 1], [x.data_ptr(), y.data_ptr(), middle, rows, 8, number[0.5]]),
            ([rows - 1, 1, 1], [middle + 32, out.data_ptr(), middle, rows - 1, 8, number[2]]),
            ([rows, 1, 1], [middle, middle, out.data_ptr(), rows, 8, number[3]]),
        ]
    assert len(calls) == 6  # twice for each form


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_views_of_any_strides(grad, fake_cuda, seed):
    add = launcher()

    def function(x, y, out):
        add.begin(x.select(1, 2), y[0], 1.0, out.view(-1, 8))

    site, rng = replayed("ttt", function), random.Random(seed)
    for _ in range(12):
        rows, gap, start = rng.randrange(1, 5), rng.randrange(3, 6), rng.choice((0, 4, 8, 3))
        whole = torch.randn(rows * gap * 8 + start)
        x = whole[start:].view(rows, gap, 8)
        y, out = torch.randn(2, rows, 8), torch.empty(rows, 1, 8)
        with grad():
            first, *others = (asked(fake_cuda, site, x, y, out) for _ in range(3))
        assert all(each == first for each in others)
        assert first[0][1][:3] == [x.data_ptr() + 64, y.data_ptr(), out.data_ptr()]


def test_a_tensor_given_twice_may_be_two_next_time(fake_cuda):
    add = launcher()
    site = replayed("ttt", lambda x, y, out: add.begin(x, y, 1.0, out))
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for _ in range(3):
        assert asked(fake_cuda, site, x, x, y)[0][1][:3] == [x.data_ptr(), x.data_ptr(), y.data_ptr()]
    assert asked(fake_cuda, site, y, x, x)[0][1][:3] == [y.data_ptr(), x.data_ptr(), x.data_ptr()]


def test_tensor_maps_move_with_their_tensors(fake_cuda):
    fake_cuda.number("slots").value, fake_cuda.number("map_slots").value = 7, 1 << 6
    add = launcher(16, has_map=True)
    site = replayed("tt", lambda x, out: add.begin(x[1:], out, 1.0, out))
    for _ in range(5):
        x, out = torch.randn(5, 8), torch.empty(4, 8)
        site(x, out)
        (record,) = fake_cuda.launches()
        assert record.maps[0].address == x.data_ptr() + 32 and list(record.maps[0].sizes[:2]) == [8, 4]


def test_plans_of_many_launches(fake_cuda):
    """Gradients have some twenty, with tensor maps: more words than a form of arguments may have."""
    add = launcher(has_map=True)
    calls = []

    def often(x, y, out):
        calls.append(1)
        for _ in range(60):
            add.begin(x, y, 1.0, out)

    site = replayed("ttt", often, at_once=True)
    x, y, out = (torch.randn(4, 8) for _ in range(3))
    plans = [asked(fake_cuda, site, x, y, out) for _ in range(3)]
    assert [len(plan) for plan in plans] == [60] * 3
    assert len(calls) == 1


def test_numbers_and_low_bits_of_addresses_are_part_of_a_form(fake_cuda):
    add = launcher()

    def function(x, out, count, scale):
        add.begin(x[:count], x[:count], scale if x.data_ptr() % 16 else -scale, out[:count])

    site = replayed("ttqd", function)
    whole, out = torch.randn(49), torch.empty(6, 8)
    for _ in range(4):
        for start in (0, 1):
            for count, scale in ((3, 1.5), (6, 1.5), (6, 2.5)):
                x = whole[start : start + 48].view(6, 8)
                expected = asked(fake_cuda, function, x, out, count, scale)
                assert asked(fake_cuda, site, x, out, count, scale) == expected


NOT_REPLAYED = {
    "a copy": (lambda add, x, out: add.begin(x, (x.t() * 1).t().contiguous(), 1.0, out), "aten::mul"),
    "a fill": (lambda add, x, out: (out.zero_(), add.begin(x, x, 1.0, out)), "aten::zero_"),
    "a value": (lambda add, x, out: add.begin(x, x, x.sum().item(), out), "aten::sum"),
    "a number": (lambda add, x, out: add.begin(x, x, x[0, 0].item(), out), "aten::_local_scalar_dense"),
    "a constant": (lambda add, x, out: add.begin(x, CONSTANT, 1.0, out), "no view of an argument"),
    "nothing": (lambda add, x, out: None, "nothing is launched"),
}
CONSTANT = torch.randn(4, 8)


@pytest.mark.parametrize(("function", "why"), NOT_REPLAYED.values(), ids=NOT_REPLAYED)
def test_anything_else_goes_the_long_way(function, why, fake_cuda, caplog):
    add, calls = launcher(), []
    site = replayed("tt", lambda *args: calls.append(1) or function(add, *args))
    x, out = torch.randn(4, 8), torch.empty(4, 8)
    with caplog.at_level(logging.INFO, "torch_tile"):
        launched = [len(asked(fake_cuda, site, x, out)) for _ in range(4)]
    assert len(calls) == 5 and len(set(launched)) == 1  # the second time it is planned first
    assert caplog.text.count("are not replayed") == 1 and why in caplog.text


def test_kernels_that_want_more_of_an_address(fake_cuda, caplog):
    add = launcher(alignment=64)
    site = replayed("ttt", lambda x, y, out: add.begin(x, y, 1.0, out))
    whole = torch.randn(3, 48, 8)
    start = -whole.data_ptr() // 4 % 16
    tensors = [each.view(-1)[start:][:32].view(4, 8) for each in whole]
    with caplog.at_level(logging.INFO, "torch_tile"):
        assert len({str(asked(fake_cuda, site, *tensors)) for _ in range(3)}) == 1
    assert "multiples of more than 16" in caplog.text


def test_an_error_leaves_nothing_behind(fake_cuda):
    add, broken = launcher(), [True]

    def function(x, out):
        add.begin(x, x, 1.0, out)
        if broken[0]:
            raise ZeroDivisionError("planted")

    site, (x, out) = replayed("tt", function), (torch.randn(4, 8), torch.empty(4, 8))
    for broken[0] in (False, True, True):
        try:
            site(x, out)
        except ZeroDivisionError:
            assert broken[0]
    assert current_plan() is None
    broken[0] = False
    site(x, out)
    broken[0] = True
    site(x, out)
    fake_cuda.launches()
    fake_cuda.number("refuse").value = 700
    with pytest.raises(LaunchError, match="it was asked to fail"):
        site(x, out)


def test_what_is_not_replayed_is_done_once(fake_cuda):
    """A function that touches memory is planned up to there, which changes nothing, and then called."""
    add, x, out = launcher(), torch.ones(4, 8), torch.zeros(4, 8)

    def function(x, out):
        add.begin(x, x, 1.0, out)
        out.add_(x)

    site = replayed("tt", function)
    for n in range(1, 4):
        assert len(asked(fake_cuda, site, x, out)) == 1
        assert torch.equal(out, n * x)


def test_without_a_gpu_or_a_compiler_it_is_the_function(monkeypatch):
    def function(x):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(replay, "launch_function", lambda *_: None)
        assert replayed("t", function) is function
    monkeypatch.setattr(CudaLauncher, "kind", "cuda")
    assert torch.cuda.is_available() or replayed("t", function) is function


def test_tensors_that_are_not_plain_go_to_the_function(fake_cuda):
    calls = []
    site = replayed("t", calls.append)
    odd = [torch.empty(3, device="meta"), torch._neg_view(torch.ones(3)), torch.eye(3).to_sparse()]
    for each in (*odd, *odd):
        site(each)
    assert [id(c) for c in calls] == [id(o) for o in (*odd, *odd)]
    long_way = LongWay(calls.append)
    long_way(odd[0])
    assert not long_way.met
